"""What a completion is worth: weighted parts, scored by built-ins or by user code in killable workers."""
