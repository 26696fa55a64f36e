"""`gspo bench --compare REF`: is a step of this working tree slower than a step of another commit?"""
