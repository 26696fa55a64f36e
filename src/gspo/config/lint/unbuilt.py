"""What a config can say and this version cannot do. A key is used, idle and named, or refused here; none is ignored.

`gspo doctor` shows these as errors and `gspo train` stops at them. A key leaves this list when its part is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.schema import Config


def unbuilt(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key, what is missing, what to set instead) for everything this config asks for in vain."""
    actor = config.actor
    asked = (
        ("actor.attn_impl", actor.attn_impl not in ("auto", "sdpa"), "a choice of attention kernel", "set it to auto"),
        ("actor.disable_dropout", not actor.disable_dropout, "dropout in training", "set it to true"),
        ("actor.mb_spec.granularity", actor.mb_spec.granularity != 1, "granularity of micro-batches", "set it to 1"),
        (
            "actor.mb_spec.packing_algorithm",
            actor.mb_spec.packing_algorithm != "ffd",
            "another packing algorithm",
            "set it to ffd",
        ),
    )
    for key, is_asked, what, instead in asked:
        if is_asked:
            yield key, what, instead
