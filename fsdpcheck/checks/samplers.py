"""Checks of samplers: what each rank was dealt, entry by entry.

Legend: D records, P shares that they are split into; ranks along a replicated axis have the same share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from fsdpcheck.adapters.capabilities import Drawn
from fsdpcheck.case import SamplerCase
from fsdpcheck.case.sampler import SamplingSpec, epoch_steps, repeated, share_count, share_of
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.program.samplers import SAMPLER

Epoch = list[Drawn]
Share = list[Epoch]
_SEVERAL = 32
"""Steps of which one has the most records of all by chance too seldom to be thought of."""
Batches = dict[tuple[int, int], list[tuple[int, ...]]]
"""(epoch, step) -> the records of each share."""

_CHANCE = 1e-6
"""What chance does more seldom is called a cause."""


def case_of(execution: Execution) -> SamplerCase:
    """What the sampler was asked for. Raises UsageError for a case of something else."""
    case = execution.request.case
    if not isinstance(case, SamplerCase):
        raise UsageError("the run was not one of a sampler; next: give it a SamplerCase")
    return case


def spec_of(execution: Execution) -> SamplingSpec:
    """The same without mesh and seed."""
    return case_of(execution).sampling


def ranks_of(execution: Execution) -> list[Share]:
    """By rank and epoch: the steps that were drawn. Raises Violation with the failure's report if a rank failed.

    And UsageError where an epoch of a rank was not observed: nothing would be compared.
    """
    spec, found = spec_of(execution), []
    for result in completed(execution):
        found.append([drawn for who, _, _, drawn in result.observations if who == SAMPLER])
        if len(found[-1]) != spec.epochs:
            got = f"{len(found[-1])} of {spec.epochs} epochs were observed on rank {result.rank}"
            raise UsageError(f"{got}; next: have the run draw the whole case (program.samplers)")
    return found


def shares_of(execution: Execution) -> list[Share]:
    """The same by share, once ranks that have the same one agree on it."""
    case = case_of(execution)
    spec = case.sampling
    everyone, found = ranks_of(execution), dict[int, int]()
    for rank, own in enumerate(everyone):
        first = found.setdefault(share_of(spec, case.mesh, rank), rank)
        if own != everyone[first]:
            _refuse_other_replica(everyone, first, rank, partial(_of_axes, case, everyone))
    return [everyone[found[share]] for share in range(share_count(spec, case.mesh))]


def assert_dealt_out(execution: Execution) -> None:
    """In every epoch the shares are equally long and hold every record once, but for what P not dividing D costs.

    Dropped: fewer than P records, none twice. Taken again: fewer than P entries repeat a record, and no record stands
    more often than it has to. Where the sampler marks entries that repeat, the rest holds every record exactly once.
    """
    case = case_of(execution)
    spec = case.sampling
    shares = shares_of(execution)
    count, extra = len(shares), repeated(spec, case.mesh)
    kept = spec.records + extra if extra or not spec.drop_last else spec.records - spec.records % count
    for epoch in range(spec.epochs):
        lists = [[record for step in share[epoch] for record in step.records] for share in shares]
        _require_lengths(lists, kept // count, epoch, spec.records)
        times = Counter(record for own in lists for record in own)
        most = -(-kept // spec.records)
        for record in range(spec.records):
            _require_times(record, times[record], 0 if spec.drop_last else 1, most, lists, epoch, extra)
        _require_marks([step for share in shares for step in share[epoch]], times, epoch)


def assert_equal_steps(execution: Execution) -> None:
    """Every rank takes as many steps as it should, in as many micro-batches as the others.

    Shares: none is longer than asked. Poisson draws: every step of every rank has the same number of micro-batches, so
    that it tells nothing of the draw.
    """
    case = case_of(execution)
    spec = case.sampling
    wanted = epoch_steps(spec, case.mesh) - spec.start
    first, *_ = everyone = ranks_of(execution)
    for rank, own in enumerate(everyone):
        for number, epoch in enumerate(own):
            where = f"epoch {number}, rank {rank}"
            if len(epoch) != wanted:
                cause = _of_steps(spec, len(epoch), wanted, everyone)
                raise Violation("a rank takes another number of steps", got=f"{len(epoch)} steps",
                                wanted=f"{wanted} steps, as all ranks", where=where, cause=cause)  # fmt: skip
            for step, drawn in enumerate(epoch):
                like = first[0][0] if spec.kind == "poisson" else first[number][step]
                most = spec.batch_size if spec.kind == "shares" else spec.records
                _require_chunks(drawn, like, most, f"{where}, step {step}", _none_empty(everyone))


def assert_orders(execution: Execution, again: Execution) -> None:
    """Shuffled epochs have different orders, and none that of the data set; others have that of the data set, always.

    Made anew from the same seed the sampler gives the same orders. Needs so many records that chance does not make two
    orders equal.
    """
    spec, first = spec_of(execution), shares_of(execution)
    if first != shares_of(again):
        raise Violation("the order of an epoch does not follow from seed and epoch", got="another order again",
                        wanted="the same", where="two samplers of one seed")  # fmt: skip
    seen: dict[tuple[tuple[int, ...], ...], str] = {_in_order(first, spec): "the data set"}
    for epoch in range(spec.epochs):
        order = tuple(tuple(r for step in share[epoch] for r in step.records) for share in first)
        before = seen.setdefault(order, f"epoch {epoch}")
        if spec.shuffle == (before != f"epoch {epoch}"):
            got = f"the order of {before}" if spec.shuffle else "another order"
            repeats = f"epoch {epoch} repeats the order of {before}: its number does not reach the shuffle"
            wanted = "another order" if spec.shuffle else "the order of the data set"
            lists, extra = [[*own] for own in order], repeated(spec, case_of(execution).mesh)
            cause = repeats if spec.shuffle else partial(_of_overlap, lists, extra)
            raise Violation("an epoch has the wrong order", got=got, wanted=wanted, where=f"epoch {epoch}", cause=cause)


def assert_goes_on(execution: Execution, resumed: Execution) -> None:
    """A sampler made anew that goes on at a later step gives what one that never stopped gave from there on."""
    start = spec_of(resumed).start
    if not start:
        raise UsageError("the second run starts where the first one does; next: give its case a start above 0")
    for rank, (own, later) in enumerate(zip(ranks_of(execution), ranks_of(resumed), strict=True)):
        for epoch, (whole, rest) in enumerate(zip(own, later, strict=True)):
            if rest != whole[start:]:
                got = [step.records for step in rest]
                cause = ""
                if [step.records for step in whole[: len(rest)]] == got:
                    cause = "the epoch begins again after a stop"
                raise Violation("a sampler goes on with other records after a stop", got=str(got),
                                wanted=str([step.records for step in whole[start:]]),
                                where=f"epoch {epoch} from step {start} on, rank {rank}", cause=cause)  # fmt: skip


def assert_one_rank_each(execution: Execution) -> None:
    """In every step of a Poisson draw no record stands twice, on one share or on two."""
    for (epoch, step), drawn in logical(execution).items():
        times = Counter(record for own in drawn for record in own)
        twice = next((record for record, count in times.items() if count > 1), None)
        if twice is not None:
            owners = [share for share, own in enumerate(drawn) if twice in own]
            cause = f"record {twice} belongs to shares {owners}" if len(owners) > 1 else "records are drawn with others"
            raise Violation("a record joins a step twice", got=f"record {twice} on shares {owners}", wanted="once",
                            where=f"epoch {epoch}, step {step}", cause=cause)  # fmt: skip


def assert_same_draws(one: Execution, other: Execution) -> None:
    """The logical batch of every step is the same set of records at two numbers of ranks."""
    first, second = logical(one), logical(other)
    for place in sorted(first.keys() | second.keys()):
        wanted, got = ({record for own in drawn.get(place, []) for record in own} for drawn in (first, second))
        if wanted != got:
            sizes = [execution.request.case.world_size for execution in (one, other)]
            raise Violation("which records are drawn depends on the number of ranks", got=str(sorted(got)),
                            wanted=str(sorted(wanted)), where=f"epoch {place[0]}, step {place[1]}, W = {sizes[1]}"
                            f" against W = {sizes[0]}",
                            cause=partial(_of_other_draws, spec_of(one).rate, first, second))  # fmt: skip


def _of_other_draws(rate: float, first: Batches, second: Batches) -> Causes | None:
    """Whether records that the same rank draws in both runs are drawn alike; None where that says nothing."""
    if first.keys() != second.keys():
        return []
    owners = [{record: share for lists in drawn.values() for share, own in enumerate(lists) for record in own}
              for drawn in (first, second)]  # fmt: skip
    if len(first) >= _SEVERAL and _cut_off(first, second, owners[0]) and _cut_off(second, first, owners[1]):
        return [Cause("cut off", "a rank that draws many records leaves some out, and how many is many depends on W")]
    stay = {record for record, share in owners[0].items() if owners[1].get(record) == share}
    drawn = [[stay.intersection(*[{r for own in lists for r in own}]) for lists in run.values()]
             for run in (first, second)]  # fmt: skip
    alike = (rate * rate + (1 - rate) ** 2) ** (len(stay) * len(first))  # by chance
    by_rank = Cause("rank", "the draw of a record depends on which rank makes it")
    by_number = Cause("number of ranks", "records that stay on their rank are drawn otherwise among other ranks")
    if drawn[0] != drawn[1]:
        return [by_number]
    return [by_rank] if alike < _CHANCE else None


def _cut_off(drawn: Batches, other: Batches, owner: Mapping[int, int]) -> bool:
    """Whether records that ``drawn`` lacks are missing only on shares that hold as many as any share ever does."""
    most = max((len(own) for lists in drawn.values() for own in lists), default=0)
    missing = ((place, owner.get(record)) for place, lists in other.items() for own in lists
               for record in set(own).difference(*drawn[place]))  # fmt: skip
    return all(share is not None and len(drawn[place][share]) == most for place, share in missing)


def logical(execution: Execution) -> Batches:
    """(epoch, step) -> the records of each share."""
    shares = shares_of(execution)
    steps = [max(len(share[epoch]) for share in shares) for epoch in range(len(shares[0]))]
    return {
        (epoch, step): [share[epoch][step].records for share in shares if step < len(share[epoch])]
        for epoch, count in enumerate(steps)
        for step in range(count)
    }


def _refuse_other_replica(everyone: list[Share], first: int, rank: int, cause: Diagnose) -> None:
    for epoch, (one, two) in enumerate(zip(everyone[first], everyone[rank], strict=True)):
        for step in range(max(len(one), len(two))):
            a, b = (steps[step] if step < len(steps) else None for steps in (one, two))
            if a == b:
                continue
            shown = [_shown(drawn, a, b) for drawn in (a, b)]
            where = f"epoch {epoch}, step {step}, rank {rank} against rank {first}"
            what = "ranks along a replicated axis have different records"
            raise Violation(what, got=shown[1], wanted=shown[0], where=where, cause=cause)


def _shown(drawn: Drawn | None, one: Drawn | None, other: Drawn | None) -> str:
    """The records of a step, with which of them repeat if the steps of two ranks differ in that alone."""
    if drawn is None:
        return "no step"
    alike = one is not None and other is not None and one.micro_batches == other.micro_batches
    return f"{drawn.micro_batches}" + (f", of which {drawn.repeats} repeat" if alike else "")


def _of_axes(case: SamplerCase, everyone: list[Share]) -> Causes:
    """Whether ranks are dealt to as if the replicated axis were the distributed one, and the reverse."""
    spec, size = case.sampling, case.mesh.dp_shard
    if spec.shards == spec.replicas:
        return []
    numbers = [rank % size if spec.shards == "replicated" else rank // size for rank in range(len(everyone))]
    alike = all(own == everyone[numbers.index(number)] for own, number in zip(everyone, numbers, strict=True))
    text = "the axis is not the one that the samples are replicated over"
    return [Cause("axis", text)] if alike else []


def _require_lengths(lists: list[list[int]], wanted: int, epoch: int, records: int) -> None:
    for share, own in enumerate(lists):
        if len(own) != wanted:
            raise Violation("shares are not equally long", got=f"{len(own)} entries", wanted=f"{wanted} entries",
                            where=f"epoch {epoch}, share {share}",
                            cause=lambda: _of_lengths(lists, wanted, records))  # fmt: skip


def _of_lengths(lists: list[list[int]], wanted: int, records: int) -> Causes:
    """Whether shares have one entry fewer each, and the rest of the records is drawn by nobody."""
    missing = records - len({record for own in lists for record in own})
    if not missing or any(len(own) != wanted - 1 for own in lists):
        return []
    many = f"{missing} of {records} records are" if missing > 1 else f"one of {records} records is"
    return [Cause("rounded down", f"the length of shares is rounded down: {many} in no share")]


def _require_times(record: int, got: int, low: int, high: int, lists: list[list[int]], epoch: int, extra: int) -> None:
    if not low <= got <= high:
        owners = [share for share, own in enumerate(lists) if record in own]
        where = f"epoch {epoch}, record {record}, on shares {owners}" if owners else f"epoch {epoch}, record {record}"
        wanted = f"{low} times" if low == high else f"{low} to {high} times"
        raise Violation("an epoch does not hold every record as often as promised", got=f"{got} times", wanted=wanted,
                        where=where, cause=lambda: _of_overlap(lists, extra))  # fmt: skip


def _of_overlap(lists: list[list[int]], extra: int) -> Causes | None:
    """Causes of shares (records by share) of which some record is in too many. None: one entry each tells nothing.

    ``extra``: how many entries may be in two shares because P does not divide D.
    """
    records = [record for own in lists for record in own]
    if len(records) - len(set(records)) <= extra:
        return []
    pairs = [(one, other) for k, one in enumerate(lists) for other in lists[:k] if set(one) & set(other)]
    told = [(one, other) for one, other in pairs if len(one) > 1]
    if any(one != other for one, other in told):
        return [Cause("orders", "shares overlap: ranks do not split one and the same order")]
    if told:
        return [Cause("numbers", "shares are the same: ranks do not split by their own number")]
    return None if pairs else []


def _require_marks(steps: list[Drawn], times: Counter[int], epoch: int) -> None:
    if any(step.repeats is None for step in steps):
        return
    marked = Counter(record for step in steps for record in step.repeats or ())
    for record, count in times.items():
        if count - marked[record] != 1:
            few = sum(marked.values()) < times.total() - len(times)
            cause = f"entries that repeat a record are not marked as such{'' if few else ': others are'}"
            raise Violation("marks do not tell repeated entries from others", got=f"{marked[record]} of {count} marked",
                            wanted=f"{count - 1}", where=f"epoch {epoch}, record {record}", cause=cause)  # fmt: skip


def _require_chunks(drawn: Drawn, like: Drawn, most: int, where: str, none_empty: bool) -> None:
    sizes = list(map(len, drawn.micro_batches))
    if len(sizes) != len(like.micro_batches):
        raise Violation("a step has another number of micro-batches", got=f"{len(sizes)}, of {sizes} records",
                        wanted=f"{len(like.micro_batches)}, as elsewhere", where=where,
                        cause="empty micro-batches are left out" if none_empty else "",
                        )  # fmt: skip
    if max(sizes, default=0) > most:
        raise Violation("a micro-batch is longer than was asked for", got=f"{max(sizes)} records",
                        wanted=f"at most {most}", where=where)  # fmt: skip


def _none_empty(everyone: list[Share]) -> bool:
    """Whether no rank has a micro-batch without records in any step."""
    return all(chunk for own in everyone for epoch in own for drawn in epoch for chunk in drawn.micro_batches)


def _of_steps(spec: SamplingSpec, got: int, wanted: int, everyone: list[Share]) -> str:
    """What another number of steps comes of."""
    if spec.kind == "poisson":
        left_out = "steps in which the rank draws no record are left out: it misses their collectives, and their noise"
        return left_out if got < wanted else ""
    if len({sum(len(step.records) for step in epoch) for own in everyone for epoch in own}) == 1:
        return ""
    return "ranks have different numbers of records: shares are not made equally long"


def _in_order(shares: list[Share], spec: SamplingSpec) -> tuple[tuple[int, ...], ...]:
    """What the shares of the data set's own order are, dealt out one by one or in blocks, whichever was."""
    count, length = len(shares), sum(len(step.records) for step in shares[0][0])
    entries = [place % spec.records for place in range(length * count)]
    dealt = tuple(tuple(entries[share::count]) for share in range(count))
    blocks = tuple(tuple(entries[share * length : (share + 1) * length]) for share in range(count))
    own = tuple(tuple(r for step in share[0] for r in step.records) for share in shares)
    return blocks if own == blocks else dealt
