"""Forget the compiled library of this process, so that its next use is a first use."""

from gspo.sampling import few_rows, library


def forget_native():
    few_rows.load_native.cache_clear()
    library.load_library.cache_clear()
