"""Measurements that print their own tables: the objective alone, and (later) whole steps against TRL."""
