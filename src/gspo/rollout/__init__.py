"""From prompts to scored groups, within the staleness bound."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.rollout.buffer import Buffer, Snapshot
    from gspo.rollout.groups import (
        Filter, GroupAssembler, RejectReason, Workflow, from_data, refuse_failures, reject_by_filter, sample_groups,
        single_turn,
    )
    from gspo.rollout.producer import NullProducer, RolloutProducer
    from gspo.rollout.storage import pack_batch, pack_groups, unpack_batch, unpack_groups
    # fmt: on

__getattr__ = face(__name__)
