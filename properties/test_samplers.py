"""Samplers: which rank gets which record, in which step; in shares of equal length, and by Poisson draws.

Index lists are compared entry by entry. What is promised of chance alone is judged by exact binomial tests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsdpcheck.case import MeshSpec, SamplerCase
from fsdpcheck.case.sampler import epoch_steps
from fsdpcheck.checks.poisson import assert_poisson, assert_rate
from fsdpcheck.checks.sampler_seeds import assert_seed_matters
from fsdpcheck.checks.samplers import (
    assert_dealt_out,
    assert_equal_steps,
    assert_goes_on,
    assert_one_rank_each,
    assert_orders,
    assert_same_draws,
)
from fsdpcheck.checks.shuffled_epochs import FALSE_ALARM, assert_come_everywhere
from fsdpcheck.checks.training import assert_collectives_equal
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import BuiltSpace, SamplerSpace, samplers_and_kernels

_SHARES = SamplerSpace(kind="epochs")
_EPOCHS = SamplerSpace(kind="epochs", several=True)
_SHUFFLED = _EPOCHS.but(shuffled=True)
_MANY_EPOCHS = BuiltSpace(
    build=partial(samplers_and_kernels.many_epochs, chance=FALSE_ALARM), words="one case of many shuffled epochs"
)
_DRAWS = SamplerSpace(kind="poisson")
_LONG = SamplerSpace(kind="poisson", steps=(128, 128), certain=False, two_epochs=True)
"""256 steps: two records that always agree then do so by chance below 1e-27."""
_EVEN = SamplerSpace(kind="poisson", steps=(40, 40), rates=(0.5,), certain=False)
"""40 even draws of each record in an epoch: two seeds give all of them alike by chance below 1e-12."""
_MANY = BuiltSpace(build=samplers_and_kernels.many_draws, words="one case of 2^20 draws with probability 1/2")
_SELDOM_LARGE = BuiltSpace(build=samplers_and_kernels.seldom_large, words="one case of 1024 steps of 64 records")


def _later(case: SamplerCase) -> SamplerCase:
    """The case from the middle of every epoch on."""
    later = epoch_steps(case.sampling, case.mesh) // 2
    return replace(case, sampling=replace(case.sampling, start=later))


def _reseeded(case: SamplerCase) -> SamplerCase:
    """The case with the seed beside its own."""
    return replace(case, seed=case.seed ^ 1)


@law("samplers.dealt", promise="epochs", space=_SHARES.but(must_occur=("several ranks",)))
def test_an_epoch_is_dealt_out_to_the_ranks(case: SamplerCase, run: Run) -> None:
    """An epoch's shares are equally long and hold every record once, but for fewer than P left out or taken twice.

    P shares: ranks along a replicated axis have the same one, along a distributed axis their own. Entries that repeat a
    record are marked, where the sampler marks any.
    Not seen: whether a training loop counts marked entries.
    Source: pytorch#25162, Lightning#17713, Opacus#444.
    """
    assert_dealt_out(run(case))


@law("samplers.steps", promise="epochs", space=_SHARES.but(must_occur=("several ranks",)))
def test_all_ranks_take_equally_many_steps(case: SamplerCase, run: Run) -> None:
    """Every rank takes the same number of steps and micro-batches, and calls the same collectives to sample.

    Not seen: which records the steps have (samplers.dealt).
    Source: torchtitan#1618, prime-rl#2515, where ranks that ran out of batches left the others in a collective.
    """
    assert_equal_steps(execution := run(case))
    assert_collectives_equal(execution)


@law("samplers.epochs", promise="epochs", space=_EPOCHS.but(must_occur=("several ranks",)))
def test_every_epoch_has_an_order_of_its_own(case: SamplerCase, run: Run) -> None:
    """Shuffled epochs have different orders that follow from seed and epoch; others that of the data set, every time.

    Two orders of 16 records or more are equal by chance below 1e-13.
    Not seen: whether all orders are equally likely (samplers.shuffled), and whether a training loop tells the epoch.
    Source: accelerate#4071, where a resumed epoch was the first one again.
    """
    assert_orders(run(case), run(case))


@law("samplers.seeded", promise="epochs", space=_SHUFFLED.but(must_occur=("several ranks",)))
def test_another_seed_gives_other_orders(case: SamplerCase, run: Run) -> None:
    """With another seed each shuffled epoch has another order: the seed that a user gives reaches the sampler.

    D records of which k are dealt out, E epochs: right orders are called wrong with probability E (D - k)! / D! at
    most, which is below 1e-9 in each case. Asked of shuffled epochs alone.
    Not seen: orders that follow from no seed (samplers.epochs); an epoch of one seed that is another epoch of another,
    as DistributedSampler has them, which adds seed and epoch.
    Source: torchtune#2339, fairchem#697, Lightning#7024, transformers#11406, where the seed was always 0.
    """
    assert_seed_matters(run(case), run(_reseeded(case)))


@law("samplers.shuffled", promise="epochs", space=_MANY_EPOCHS.but(ranks=2))
def test_shuffled_epochs_bring_every_record_to_every_share(case: SamplerCase, run: Run) -> None:
    """Over many shuffled epochs every record comes to every share: none is left out of all, none stays where it was.

    D records, P shares, E epochs: orders that are equally likely are called wrong with probability D P (1 -
    floor(D/P)/D)^E at most, and E is the first for which that is 1e-9 (D = 9, P = 2: 41). One case, flat, the tail
    dropped. Asked of shuffled epochs alone.
    Not seen: records that are never left out, and orders that come more often than others.
    Source: speechbrain#1518, shares that kept their records in all epochs; meta-pytorch/data#302.
    """
    assert_come_everywhere(run(case))


@law("samplers.resumed", promise="epochs", space=_EPOCHS.but(must_occur=("several ranks",)))
def test_a_stopped_epoch_goes_on_where_it_stopped(case: SamplerCase, run: Run) -> None:
    """A sampler made anew that goes on at a later step of any epoch gives the records that were still to come.

    Not seen: how a training stores where it stood.
    Source: accelerate#4071, accelerate#4203.
    """
    assert_goes_on(run(case), run(_later(case)))


@law(
    "samplers.poisson-once",
    promise="poisson",
    space=_DRAWS.but(vacuous_without=("several ranks",)),
)
def test_a_record_joins_a_step_on_one_rank(case: SamplerCase, run: Run) -> None:
    """In a step every record is drawn at most once, by one share; ranks that share a batch draw the same.

    Not seen: records that are drawn too seldom, or never (samplers.poisson-law).
    Source: Opacus#444, where every rank drew from the whole data set, so that a record counted W times.
    """
    assert_one_rank_each(run(case))


@law("samplers.poisson-steps", promise="poisson", space=_DRAWS.but(must_occur=("several ranks",)))
def test_empty_draws_are_steps_too(case: SamplerCase, run: Run) -> None:
    """Every rank takes every step, in as many micro-batches as all others, also where it draws no record.

    The number of micro-batches is the same in all steps: it is public, what is drawn is not.
    Not seen: what a training makes of an empty step, and whether it adds noise there.
    Source: Opacus#164, whose distributed sampler yields nothing for an empty draw.
    """
    assert_equal_steps(execution := run(case))
    assert_collectives_equal(execution)


@law("samplers.poisson-law", promise="poisson", space=_LONG.but(must_occur=("several ranks",)))
def test_records_join_independently_with_one_probability(case: SamplerCase, run: Run) -> None:
    """All draws of all records are independent, on whichever rank they are made, with the probability asked for.

    Tested on the number of draws, on the sizes of batches, on every pair of records and of steps: right draws are
    called wrong with probability 1e-9 a case. Found are ranks that draw one stream, batches of fixed size, draws that
    come again. A batch of binomial size that is a uniform subset is the same law (jax_privacy#121).
    Not seen: dependence of three records or more, or of two that agree in less than a quarter of the steps too many.
    Source: Opacus#271, private-transformers#7, jax_privacy#84.
    """
    assert_poisson(run(case))


@law("samplers.poisson-seeded", promise="poisson", space=_EVEN.but(must_occur=("several ranks",)))
def test_another_seed_gives_other_draws(case: SamplerCase, run: Run) -> None:
    """With another seed each share draws other records in each epoch: the seed reaches the draws of every rank.

    q the probability, P shares, E epochs of S steps: right draws are called wrong with probability E P (q^2 + (1 -
    q)^2)^S at most, which is below 1e-9 in each case. Asked of shares that draw some record.
    Not seen: draws that follow from no seed (samplers.poisson-resumed), and draws of two seeds that are alike in part.
    Source: no public report known of Poisson draws; fairchem#697, a sampler whose seed was always 0.
    """
    assert_seed_matters(run(case), run(_reseeded(case)))


@law("samplers.poisson-rate", promise="poisson", space=_MANY)
def test_records_join_with_the_probability_asked_for(case: SamplerCase, run: Run) -> None:
    """Of 2^20 draws with probability 1/2 as many join as should.

    Right draws are called wrong with probability 1e-9, a probability that is 1 % off is found with 0.99. One case.
    Not seen: which records join and together with which (samplers.poisson-law); the rate that an accountant is told.
    Source: Opacus#813, a rate that was taken from the number of batches.
    """
    assert_rate(run(case))


@law(
    "samplers.poisson-world",
    promise="same-draws",
    space=_DRAWS.but(must_occur=("several ranks",)),
    takes=2,
)
def test_draws_do_not_depend_on_the_number_of_ranks(case: SamplerCase, run: Run) -> None:
    """The same seed draws the same records in the same steps on one rank and on any number of them.

    Not seen: draws that are wrong on any number of ranks alike (samplers.poisson-law).
    Source: Opacus#271, whose draws follow from the generator of each rank.
    """
    others = min(3, run.features.max_world_size or 3)
    assert_same_draws(run(case), run(replace(case, mesh=MeshSpec(1 if case.world_size > 1 else others))))


@law("samplers.poisson-room", promise="same-draws", space=_SELDOM_LARGE.but(ranks=2))
def test_large_draws_are_drawn_whole_on_any_number_of_ranks(case: SamplerCase, run: Run) -> None:
    """Draws that are seldom large are the same on one rank and on several too: no rank leaves out what is too many.

    1024 steps of 64 records, one case. Records that are left out of one draw of a rank in 256 are missed, on four ranks
    and on one, with a probability below 1e-8; of one in 1024, below 1 %. To leave any out makes one record's presence
    change another's.
    Not seen: room that is exceeded more seldom, and room that is the same on one rank and on all together.
    Source: jax_privacy#121, whose draws would be no Poisson draws if cut off; no public report known of any that were.
    """
    assert_same_draws(run(case), run(replace(case, mesh=MeshSpec(1))))


@law(
    "samplers.poisson-resumed",
    promise="same-draws",
    space=_DRAWS.but(must_occur=("several ranks",)),
)
def test_draws_after_a_stop_are_those_that_were_to_come(case: SamplerCase, run: Run) -> None:
    """A Poisson sampler made anew that goes on at a later step draws what one that never stopped would have drawn.

    Draws that begin again are used twice, which no accountant allows for.
    Not seen: how a training stores where it stood; draws that are wrong from the start.
    Source: accelerate#4071.
    """
    assert_goes_on(run(case), run(_later(case)))
