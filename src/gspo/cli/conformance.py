"""`gspo conformance`: a loss function against the test vectors, or a dump of log-probs against the known losses."""

from __future__ import annotations

import argparse
import json

from gspo.cli.common import console, did_you_mean
from gspo.errors import ConfigError


def conformance(args: argparse.Namespace) -> int:
    """Exit code 1 if the loss differs where a paper decides, or nothing explains the dump."""
    if (args.function is None) + (args.target is None) + (args.explain is None) != 2:
        raise ConfigError("pass a function (module:function), or --target NAME, or --explain FILE")
    if args.explain is not None:
        from gspo.conformance import explain

        found = explain.explain_file(args.explain)
        print(json.dumps(found.as_json()) if args.json else "\n".join(found.lines()))
        return 0 if found.is_explained else 1
    from gspo.conformance import case_named, check_all, show

    tested = _target(args) if args.target else _function(args)
    outcomes = check_all(tested, [case_named(name) for name in args.case] if args.case else None)
    if args.json:
        print(json.dumps(show.as_json(tested, outcomes), ensure_ascii=False))
    else:
        console().print(show.table_of(tested, outcomes, args.all))
    return 1 if any(outcome.is_wrong for outcome in outcomes) else 0


def _target(args: argparse.Namespace):
    from gspo.conformance import targets

    if args.target not in targets.TARGETS:
        known = ", ".join(targets.TARGETS)
        raise ConfigError(f"unknown target {args.target!r}{did_you_mean(args.target, targets.TARGETS)} Known: {known}")
    return targets.target(args.target, args.source)


def _function(args: argparse.Namespace):
    from gspo.conformance import implementation

    return implementation(
        args.function,
        objective=args.objective,
        advantage_per=args.advantage_per,
        advantage=args.advantages,
        logp=args.logprobs,
    )
