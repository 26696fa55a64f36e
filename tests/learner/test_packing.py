import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import DataError
from gspo.learner.policy.packing import Completion, PackItem, micro_batches, pack


def completion(tokens, mask=None, index=0):
    return Completion(np.array(tokens), np.ones(len(tokens), bool) if mask is None else np.array(mask, bool), index)


def test_a_group_is_a_prompt_segment_with_one_child_per_completion():
    item = PackItem(np.array([1, 2, 3]), (completion([10, 11, 12], index=4), completion([20, 21], index=7)))
    packed = pack([item])
    assert packed.tokens.tolist() == [1, 2, 3, 10, 11, 20]  # each last token is a target, never an input
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert (packed.start.tolist(), packed.length.tolist(), packed.parent.tolist()) == ([0, 3, 5], [3, 2, 1], [-1, 0, 0])
    assert packed.source.tolist() == [2, 3, 4, 2, 5]  # the last prompt token predicts both first tokens
    assert packed.target.tolist() == [10, 11, 12, 20, 21]
    assert (packed.cu_seqlens.tolist(), packed.index.tolist()) == ([0, 3, 5], [4, 7])


def test_untrained_spans_are_inputs_and_never_targets_and_the_tail_is_dropped():
    item = PackItem(
        np.array([1, 2]),
        (completion([10, 11, 12, 13, 14], [1, 0, 0, 1, 0]), completion([20, 21], [0, 1], 1), completion([30], index=2)),
    )
    packed = pack([item])
    assert packed.tokens.tolist() == [1, 2, 10, 11, 12, 20]
    assert packed.source.tolist() == [1, 4, 5, 1]
    assert packed.target.tolist() == [10, 13, 21, 30]
    assert packed.cu_seqlens.tolist() == [0, 2, 3, 4]


def test_a_one_token_completion_needs_no_segment_and_an_untrained_one_no_input():
    item = PackItem(np.array([1, 2]), (completion([10]), completion([20, 21], [0, 0], 1), completion([30], index=2)))
    packed = pack([item])
    assert packed.tokens.tolist() == [1, 2]
    assert (packed.parent.tolist(), packed.source.tolist(), packed.cu_seqlens.tolist()) == ([-1], [1, 1], [0, 1, 1, 2])
    assert pack([PackItem(np.array([1, 2]), (completion([20], [0]),))]).num_tokens == 0


def test_plain_packing_repeats_the_prompt_in_root_segments():
    item = PackItem(np.array([1, 2]), (completion([10, 11]), completion([20], index=1)))
    packed = pack([item], share_prefix=False)
    assert packed.tokens.tolist() == [1, 2, 10, 1, 2]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1]
    assert (packed.parent.tolist(), packed.source.tolist()) == ([-1, -1], [1, 2, 4])


def test_a_group_of_one_is_one_root_segment():
    packed = pack([PackItem(np.array([1, 2]), (completion([10, 11]), completion([9], [0], 1)))])
    assert (packed.tokens.tolist(), packed.parent.tolist()) == ([1, 2, 10], [-1])


def test_bad_items_are_named():
    with pytest.raises(DataError, match="empty prompt"):
        pack([PackItem(np.array([], int), (completion([1]),))])
    with pytest.raises(DataError, match="sequence 3: 2 tokens but a mask of 1"):
        pack([PackItem(np.array([1]), (Completion(np.array([1, 2]), np.array([True]), 3),))])
    for token in (64, -1):
        with pytest.raises(DataError, match=f"token id {token} is outside the model's vocabulary of 64"):
            pack([PackItem(np.array([1]), (completion([5, token]),))], vocab_size=64)
    with pytest.raises(DataError, match="max_tokens_per_mb"):
        micro_batches([], 0)


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6)), max_size=7
)


LAYOUTS = st.sampled_from(["shared", "packed", "padded"])


@given(groups=GROUPS, max_tokens=st.integers(1, 60), layout=LAYOUTS, min_batches=st.integers(1, 3))
def test_micro_batches_hold_every_sequence_once_within_the_bound(groups, max_tokens, layout, min_batches):
    items, index = [], 0
    for num_prompt, lengths in groups:
        completions = []
        for num, live in lengths:
            completions.append(completion(range(num), [live] * num, index))
            index += 1
        items.append(PackItem(np.arange(num_prompt), tuple(completions)))
    batches = micro_batches(items, max_tokens, layout=layout, min_batches=min_batches)
    share_prefix = layout == "shared"
    found = [c.index for batch in batches for item in batch for c in item.completions]
    assert sorted(found) == list(range(index))
    for batch in batches:
        size = sum(item.num_tokens(share_prefix=share_prefix) for item in batch)
        packed = pack(batch, share_prefix=share_prefix)
        assert size == packed.num_tokens
        num_live = sum(c.is_trained for item in batch for c in item.completions)
        if layout == "padded" and num_live:
            size = packed.padded[0].numel()
        # A one-token completion of a shared prompt has no input of its own, so a cut would not make the batch smaller.
        one_token = sum(c.is_trained and not c.num_inputs for item in batch for c in item.completions)
        assert size <= max_tokens or num_live - (one_token if share_prefix else 0) <= 1
    if layout == "padded":
        num_live = sum(c.is_trained for item in items for c in item.completions)
        assert len(batches) >= min(min_batches, num_live)
    again = micro_batches(items, max_tokens, layout=layout, min_batches=min_batches)
    assert found == [c.index for batch in again for item in batch for c in item.completions]


def test_micro_batches_are_balanced_and_keep_groups_whole_where_they_fit():
    items = [
        PackItem(np.arange(10), tuple(completion(range(11), index=4 * g + i) for i in range(4))) for g in range(6)
    ]  # 50 tokens each
    batches = micro_batches(items, 120)
    assert [sum(item.num_tokens(share_prefix=True) for item in batch) for batch in batches] == [100, 100, 100]
    cut = micro_batches(items[:1], 30)
    assert [[c.index for c in item.completions] for batch in cut for item in batch] == [[0, 2], [1, 3]]


def test_a_sequence_beyond_the_bound_gets_a_micro_batch_of_its_own():
    items = [PackItem(np.arange(5), (completion(range(40), index=0), completion(range(3), index=1)))]
    batches = micro_batches(items, 20)
    assert [[c.index for item in batch for c in item.completions] for batch in batches] == [[0], [1]]


def test_more_micro_batches_than_the_bound_needs_can_be_asked_for():
    items = [
        PackItem(np.arange(5), (completion(range(4), index=i), completion(range(4), index=9 + i))) for i in range(6)
    ]
    assert len(micro_batches(items, None)) == 1
    assert len(micro_batches(items, None, min_batches=3)) == 3
