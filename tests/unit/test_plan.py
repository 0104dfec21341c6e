# SPDX-License-Identifier: Apache-2.0
"""One pass over the data, counted in samples: batches, their number, and the blocks that workers fetch."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain, repeat

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from strategies import sizes

from lightning_adabatch.loader.plan import BlockPlan, EpochPlan

totals = st.integers(1, 200)
own_sizes = st.integers(1, 20)
tails = st.sampled_from(["keep", "carry", "drop"])
short_tails = st.sampled_from(["carry", "drop"])


def run(plan: EpochPlan, wanted: list[int]) -> list[int]:
    """Hand out the whole pass, the last size wanted standing to its end; return the sizes of its batches."""
    given_out = []
    for size in chain(wanted, repeat(wanted[-1])):
        batch = plan.hand_out(size)
        if batch == 0:
            return given_out
        given_out.append(batch)
    raise AssertionError


def copied(plan: EpochPlan) -> EpochPlan:
    """Return a copy that stands where the plan stands."""
    copy = replace(plan)
    copy.over = plan.over  # set anew by the constructor
    return copy


# Every sample once -----------------------------------------------------------------------------------------------


@given(total=totals, own=own_sizes, wanted=sizes)
def test_keep_hands_out_every_sample_once(total, own, wanted):
    """With ``"keep"`` the batches hold all samples, whatever sizes are wanted."""
    plan = EpochPlan(total, own, "keep")
    assert sum(run(plan, wanted)) == total == plan.consumed
    assert plan.left == 0


@given(total=totals, own=own_sizes, wanted=sizes)
def test_keep_gives_the_size_wanted_but_at_the_end(total, own, wanted):
    """Every batch before the last has exactly the size wanted; the last has what is left, or one sample more."""
    batches = run(EpochPlan(total, own, "keep"), wanted)
    asked = [*wanted, *repeat(wanted[-1], len(batches))][: len(batches)]
    assert batches[:-1] == asked[:-1]
    assert 1 <= batches[-1] <= asked[-1] + 1
    if batches[-1] == asked[-1] + 1:
        assert 1 < asked[-1] != own


@given(total=totals, own=own_sizes, wanted=sizes)
def test_keep_never_leaves_a_single_sample_that_the_loader_did_not_choose(total, own, wanted):
    """A batch of one is there only where a size of one was wanted, the size before was the loader's own, or 1."""
    batches = run(EpochPlan(total, own, "keep"), wanted)
    asked = [*wanted, *repeat(wanted[-1], len(batches))][: len(batches)]
    for before, size, batch in zip([own, *asked], asked, batches, strict=False):
        assert batch > 1 or size == 1 or before in {own, 1}


@given(total=totals, own=own_sizes, wanted=sizes, tail=short_tails)
def test_drop_and_carry_hand_out_full_batches(total, own, wanted, tail):
    """With ``"drop"`` and ``"carry"`` a batch has the size wanted, or where that does not fit the one in force."""
    batches = run(EpochPlan(total, own, tail), wanted)
    asked = [*wanted, *repeat(wanted[-1], len(batches))][: len(batches)]
    left = total
    for number, (size, batch) in enumerate(zip(asked, batches, strict=True)):
        assert batch == (size if size <= left else batches[number - 1])
        left -= batch
    assert left >= 0
    assert left < (batches[-1] if batches else wanted[0])


@given(total=totals, own=own_sizes, wanted=sizes)
def test_carry_and_drop_differ_in_nothing_but_the_leftover(total, own, wanted):
    """What becomes of the leftover does not change the batches before it."""
    assert run(EpochPlan(total, own, "carry"), wanted) == run(EpochPlan(total, own, "drop"), wanted)


# The number of batches --------------------------------------------------------------------------------------------


@given(
    total=totals, own=own_sizes, wanted=sizes, tail=tails, limit=st.none() | st.integers(0, 12), stop=st.integers(0, 20)
)
@example(total=74, own=8, wanted=[8, 8, 8, 8, 8, 8, 8, 8, 16], tail="drop", limit=None, stop=8)
def test_batches_left_is_what_follows_at_a_constant_size(total, own, wanted, tail, limit, stop):
    """Wherever a pass stands, the number of batches left is the number that follows if the size stays."""
    plan = EpochPlan(total, own, tail, limit)
    for size in wanted[:stop]:
        plan.hand_out(size)
    for size in {wanted[-1], own, 1}:
        assert plan.batches_left(size) == len(run(copied(plan), [size]))


@given(total=totals, size=own_sizes)
def test_count_is_that_of_a_data_loader_at_its_own_size(total, size):
    """At the loader's own size the counts are those of a DataLoader with and without ``drop_last``."""
    assert EpochPlan(total, size, "keep").batches_left(size) == -(-total // size)
    assert EpochPlan(total, size, "drop").batches_left(size) == total // size


@given(total=totals, own=own_sizes, wanted=sizes, tail=tails, limit=st.none() | st.integers(0, 12))
def test_last_is_settled_when_it_is_handed_out(total, own, wanted, tail, limit):
    """After a batch that was the last nothing follows at any size, and after any other one something does."""
    plan = EpochPlan(total, own, tail, limit)
    for size in [*wanted, *repeat(wanted[-1], total)]:
        following = [copied(plan).hand_out(other) for other in (1, size, own, 41)]
        if plan.over:
            assert following == [0] * 4
            assert [plan.batches_left(other) for other in (1, size, own, 41)] == [0] * 4
        elif plan.batches:
            assert all(following)
            assert all(plan.batches_left(other) for other in (1, size, own, 41))
        plan.hand_out(size)


@given(total=totals, own=own_sizes, wanted=sizes, tail=tails, limit=st.integers(0, 12))
def test_max_batches_ends_the_pass(total, own, wanted, tail, limit):
    """A pass with a limit has the first batches of the pass without one."""
    unlimited = run(EpochPlan(total, own, tail), wanted)
    assert run(EpochPlan(total, own, tail, limit), wanted) == unlimited[:limit]


@pytest.mark.parametrize("tail", ["keep", "carry", "drop"])
@pytest.mark.parametrize(("total", "limit"), [(0, None), (10, 0)])
def test_pass_without_samples_or_batches_is_over(tail, total, limit):
    """Nothing is handed out of a pass that has nothing to give."""
    plan = EpochPlan(total, 4, tail, limit)
    assert plan.over
    assert plan.batches_left(4) == 0
    assert plan.hand_out(4) == 0


@given(total=totals, own=own_sizes, wanted=sizes, tail=tails)
def test_next_size_is_what_is_handed_out(total, own, wanted, tail):
    """Asking for the next size changes nothing and is right."""
    plan = EpochPlan(total, own, tail)
    for size in wanted:
        expected, before = plan.next_size(size), copied(plan)
        assert plan == before
        assert plan.hand_out(size) == expected


# By hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_more_wanted_than_is_left_goes_on_with_the_size_in_force(tail):
    """74 samples, 8 -> 16 decided with 10 left: one more batch of 8, then 2 are left over."""
    plan = EpochPlan(74, 8, tail)
    assert [plan.hand_out(8) for _ in range(8)] == [8] * 8
    assert plan.left == 74 - 8 * 8
    assert plan.batches_left(16) == 1
    assert plan.hand_out(16) == 8
    assert plan.over
    assert plan.left == 10 - 8


def test_more_wanted_than_is_left_is_one_batch_with_keep():
    """The same with ``"keep"``: the 10 are one batch."""
    plan = EpochPlan(74, 8, "keep")
    for _ in range(8):
        plan.hand_out(8)
    assert plan.batches_left(16) == 1
    assert plan.hand_out(16) == 10
    assert plan.over


def test_growth_and_shrinkage_lose_no_sample():
    """64 samples: 4, 4, 4, 4 then 16 give three more batches; 16, 16 then 4 give eight more."""
    assert run(EpochPlan(64, 4, "keep"), [4, 4, 4, 4, 16]) == [4] * 4 + [16] * 3
    assert run(EpochPlan(64, 16, "keep"), [16, 16, 4]) == [16] * 2 + [4] * 8


@pytest.mark.parametrize(
    ("own", "size", "batches"),
    [
        (4, 4, [4] * 8 + [1]),  # the user chose a size that leaves one sample
        (4, 8, [8, 8, 8, 8 + 1]),
        (4, 16, [16, 16 + 1]),
        (4, 32, [32 + 1]),
        (4, 11, [11, 11, 11]),
        (4, 1, [1] * 33),
    ],
)
def test_single_leftover_joins_the_batch_before_it(own, size, batches):
    """33 samples: a last one alone joins, unless the size in force is the loader's own, or 1."""
    plan = EpochPlan(33, own, "keep")
    assert plan.batches_left(size) == len(batches)
    assert run(plan, [size]) == batches


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_single_leftover_never_joins_where_tails_are_not_trained(tail):
    """33 samples in sizes of 8, with a loader of 4: 4 batches, and one sample is left over."""
    plan = EpochPlan(33, 4, tail)
    assert run(plan, [8]) == [8] * 4
    assert plan.left == 1


def test_single_leftover_does_not_join_a_limited_batch_for_nothing():
    """The joining rule is the same under ``max_batches``: 9 samples in sizes of 8, at most 3 batches."""
    assert run(EpochPlan(9, 4, "keep", max_batches=3), [8]) == [8 + 1]


# Blocks ----------------------------------------------------------------------------------------------------------


def dispatch(
    plan: EpochPlan, wanted: list[int], ahead: int, available: int | None = None
) -> tuple[list[int], list[int]]:
    """Cut a pass from blocks as a DataLoader asks for them; return the sizes of blocks and of batches.

    With workers ``ahead`` blocks are asked for at the start, and one more whenever one arrives; without, each
    when it is needed.
    """
    blocks = BlockPlan(plan, plan.total if available is None else available)
    fetched: list[int] = []
    batches: list[int] = []
    arrived = 0  # blocks

    def ask(size: int) -> None:
        block = blocks.next_block(size)
        if block:
            fetched.append(block)
        assert blocks.dispatched == sum(fetched)

    for _ in range(ahead):
        ask(wanted[0])
    for size in chain(wanted, repeat(wanted[-1])):
        batch = plan.hand_out(size)
        if batch == 0:
            return fetched, batches
        blocks.note(batch)
        batches.append(batch)
        while sum(fetched[:arrived]) < plan.consumed:
            if ahead == 0:
                ask(size)
            assert arrived < len(fetched), "with nothing in flight a DataLoader ends"
            arrived += 1
            if ahead > 0:
                ask(size)
    raise AssertionError


@given(total=totals, own=own_sizes, wanted=sizes, tail=tails, ahead=st.integers(0, 5))
def test_blocks_cover_what_is_handed_out(total, own, wanted, tail, ahead):
    """Whatever is fetched ahead, each batch finds its samples, and no sample is fetched that does not exist."""
    plan = EpochPlan(total, own, tail)
    blocks, batches = dispatch(plan, wanted, ahead)
    assert all(block > 0 for block in blocks)
    assert sum(batches) <= sum(blocks) <= total
    if tail == "keep":
        assert sum(blocks) == total


@given(total=totals, own=own_sizes, wanted=sizes, tail=tails, ahead=st.integers(0, 5))
def test_batches_do_not_depend_on_the_blocks(total, own, wanted, tail, ahead):
    """Fetching ahead changes no batch."""
    _, batches = dispatch(EpochPlan(total, own, tail), wanted, ahead)
    assert batches == run(EpochPlan(total, own, tail), wanted)


@given(total=totals, size=own_sizes, tail=tails, ahead=st.integers(0, 5), limit=st.none() | st.integers(1, 12))
def test_at_a_constant_size_every_block_is_one_batch(total, size, tail, ahead, limit):
    """Nothing is cut or joined while the loader's own size stays, and no dropped tail is fetched."""
    blocks, batches = dispatch(EpochPlan(total, size, tail, limit), [size], ahead)
    assert blocks[: len(batches)] == batches
    if limit is None:
        assert blocks == batches


@given(total=totals, own=own_sizes, wanted=sizes, tail=tails)
def test_without_workers_every_block_is_one_batch(total, own, wanted, tail):
    """A block that is fetched on demand is the batch, however the size moves."""
    blocks, batches = dispatch(EpochPlan(total, own, tail), wanted, ahead=0)
    assert blocks == batches


@given(
    own=own_sizes,
    first=st.integers(1, 20),
    then=st.integers(1, 20),
    before=st.integers(1, 6),
    ahead=st.integers(0, 4),
)
@example(own=4, first=4, then=16, before=4, ahead=4)
@example(own=16, first=16, then=4, before=2, ahead=4)
def test_blocks_end_on_batch_borders_again_after_a_change(own, first, then, before, ahead):
    """Once the blocks in flight at a change are used up, every block is one batch again."""
    blocks, batches = dispatch(EpochPlan(600, own, "keep"), [first] * before + [then], ahead)
    settled = (before + ahead) * first + 2 * then  # what was in flight, and the way back to a border
    borders = [end for end in accumulate(batches) if settled <= end <= 500]  # the end of the data is another matter
    assert len(borders) > 3
    assert [end for end in accumulate(blocks) if settled <= end <= 500] == borders


def test_growing_size_is_extrapolated():
    """While the size grows by 1 at every batch, the block 4 ahead ends where a batch will end."""
    blocks, batches = dispatch(EpochPlan(700, 4, "keep"), list(range(4, 60)), ahead=4)
    settled = [end for end in accumulate(batches) if 120 <= end <= 600]
    assert len(settled) > 10
    assert [end for end in accumulate(blocks) if 120 <= end <= 600] == settled


def test_blocks_of_a_limited_pass_may_go_on_to_the_data_sets_end():
    """A pass over 20 of 30 samples fetches its blocks whole, as a DataLoader would: the last one is cut."""
    blocks, batches = dispatch(EpochPlan(20, 8, "keep"), [8], ahead=2, available=30)
    assert batches == [8, 8, 4]
    assert blocks[:3] == [8, 8, 8]


@pytest.mark.parametrize("tail", ["drop", "carry"])
def test_tail_is_fetched_once_the_size_moves(tail):
    """A tail that nobody will see is not fetched, unless a smaller size makes a batch of it."""
    plan = EpochPlan(20, 8, tail)
    blocks = BlockPlan(plan, 20)
    assert [blocks.next_block(8) for _ in range(4)] == [8, 8, 0, 0]
    assert blocks.next_block(4) == 4
    assert blocks.dispatched == 20


# Parts of batches -------------------------------------------------------------------------------------------------

device_limits = st.integers(1, 15)
least_parts = st.integers(1, 4)


def in_parts(plan: EpochPlan, wanted: list[int]) -> list[list[int]]:
    """Hand out the whole pass, a new size wanted for each batch; return the sizes of the parts of each."""
    batches: list[list[int]] = []
    for size in chain(wanted, repeat(wanted[-1])):
        part = plan.hand_out(size)
        if part == 0:
            return batches
        batches.append([part])
        while plan.rest:
            assert not plan.over
            batches[-1].append(plan.hand_out(10**6))  # what is wanted meanwhile is for the next batch
    raise AssertionError


@given(total=totals, own=own_sizes, tail=tails, limit=st.none() | device_limits, least=least_parts, wanted=sizes)
def test_parts_make_the_batches_that_are_handed_out_whole(total, own, tail, limit, least, wanted):
    """Together the parts of each batch are what a pass without a limit hands out; none is above the limit."""
    plan = EpochPlan(total, own, tail, device_limit=limit, least_parts=least)
    batches = in_parts(plan, wanted)
    assert [sum(parts) for parts in batches] == run(EpochPlan(total, own, tail), wanted)
    for size, parts in zip(chain(wanted, repeat(wanted[-1])), batches, strict=False):
        assert limit is None or max(parts) <= limit
        assert max(parts) - min(parts) <= 1
        assert parts == sorted(parts, reverse=True)
        together = sum(parts)
        # What is left of an epoch is not divided so that a part of one sample comes of it.
        at_least = 1 if together < min(size, 2 * least) and tail == "keep" else least
        assert len(parts) == max(-(-together // (limit or together)), min(at_least, together))
    assert plan.batches == sum(map(len, batches))


@given(
    total=totals,
    own=own_sizes,
    tail=tails,
    limit=device_limits,
    least=least_parts,
    most=st.none() | st.integers(1, 12),
    wanted=sizes,
)
def test_number_of_parts_is_foretold(total, own, tail, limit, least, most, wanted):
    """Before and inside of every batch the parts to come are counted right, if the size stays."""
    plan = EpochPlan(total, own, tail, most, device_limit=limit, least_parts=least)
    for size in wanted:
        told = plan.batches_left(size)
        rest = copied(plan)
        assert told == sum(map(len, in_parts(rest, [size]))) if plan.rest == 0 else True
        if plan.hand_out(size) == 0:
            break
        inside = copied(plan)
        foretold, begun = inside.batches_left(size), inside.batches
        while inside.hand_out(size):
            pass
        assert inside.batches - begun == foretold
        while plan.rest:
            plan.hand_out(size)
    if most is not None:
        assert plan.batches <= most


@given(total=totals, unit=own_sizes, window=st.integers(2, 4), drop=st.booleans())
def test_accumulated_batches_are_the_loaders_own(total, unit, window, drop):
    """At the initial size parts are what a plain loader gives, its incomplete batch too or not, in windows of k.

    Also where the data have less than a window; of less than a batch, too, something is trained.
    """
    own = unit * window
    assume(total > 0)
    plan = EpochPlan(total, own, "drop" if drop else "keep", device_limit=unit, unit=unit, drop_unit=drop)
    size = min(own, total)
    told = plan.batches_left(size)
    full, rest = divmod(total, unit)
    plain = [unit] * full + [rest] * (rest > 0 and not (drop and full))
    assert in_parts(plan, [size]) == [plain[start : start + window] for start in range(0, len(plain), window)]
    assert told == len(plain)


@given(
    total=totals,
    unit=own_sizes,
    window=st.integers(2, 4),
    tail=tails,
    drop=st.booleans(),
    limit=st.none() | device_limits,
    least=least_parts,
    wanted=sizes,
)
def test_units_are_dropped_only_where_they_are_incomplete(total, unit, window, tail, drop, limit, least, wanted):
    """Whatever the sizes are: nothing is trained that "keep" would not, and every count comes true."""
    own, drop = unit * window, drop and tail == "drop"
    limits = {"device_limit": min(unit, limit or unit), "unit": unit, "least_parts": least}
    plan = EpochPlan(total, own, tail, **limits, drop_unit=drop)
    strict = sum(run(EpochPlan(total, own, tail), wanted))
    last = wanted[-1]
    for size in chain(wanted, repeat(last)):
        told = plan.batches_left(size)
        rest = copied(plan)
        assert told == sum(map(len, in_parts(rest, [size])))
        if plan.hand_out(size) == 0:
            break
        assert plan.part_size <= limits["device_limit"]
        while plan.rest:
            plan.hand_out(size)
            assert plan.part_size <= limits["device_limit"]
    assert strict <= plan.consumed <= total
    if drop and plan.last_size == own:
        assert plan.left < unit


@given(total=totals, own=own_sizes, tail=tails, limit=device_limits, most=st.integers(1, 12), wanted=sizes)
def test_last_batch_has_the_parts_that_there_may_be(total, own, tail, limit, most, wanted):
    """A limit on the parts of a pass ends it with a batch of the parts that are left, never in the middle of one."""
    plan = EpochPlan(total, own, tail, most, device_limit=limit)
    batches = in_parts(plan, wanted)
    assert plan.over
    assert plan.rest == 0
    assert sum(map(len, batches)) <= most
    assert all(max(parts) <= limit for parts in batches)
