"""The driver: sweep over the norms, move each one backward or forward, and state the result as edits.

A plan is complete before anything is changed. Every Linear site carries two pending maps, `pre` and `post`; folding
composes onto one of them, and each touched weight is computed once, at the end, from its original values. When a
result does not fit its stored type, the fold that caused it is barred and the plan is made again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .affine import Affine
from .merging import Branch, composed, place, solve_merged
from .ops import Linear, Opaque, Program, Record, Scale, Sum, inputs_of, outputs_of
from .planning import Bypass, Edit, Merge, Plan, Selection, SetLinear, SetScale
from .report import Fold, Kept, Norm, Reason, Refusal, Report
from .rounding import FLOAT16
from .rules import Absorb, Push, Step, backward, cost_of, forward
from .weights import solve


def make_plan(
    program: Program,
    selection: Selection | None = None,
    refused: Mapping[int, Refusal] | None = None,
    merge: bool = True,
) -> Plan:
    """Fold everything that can be folded, but for the scales and sums `refused` from outside (by record index).

    `merge`: whether parallel branches may become one layer. Raises UsageError when a pattern matches nothing.
    """
    selection = selection or Selection()
    selection.check([r.node for r in program.records if isinstance(r, Scale)] + list(program.norms()))
    barred: dict[tuple[int, int], Refusal] = {}
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 4 * len(program.records)))  # a walk is one call a record
    while True:
        driver = _Driver(program, selection, barred, refused or {})
        driver.sweep()
        while merge and driver.merge():
            driver.sweep()
        edits = driver.edits()
        if not isinstance(edits, _Barred):
            return Plan(tuple(edits), driver.report(), driver.taken())
        barred[edits.site, edits.scale] = edits.why


@dataclass(frozen=True, slots=True)
class _Barred:
    """The fold of `scale` into `site` that gave a value its type cannot hold."""

    site: int
    scale: int
    why: Refusal


_Stage = tuple[int, Affine | None, Affine | None]
"""A scale that folded into a site, and `pre` and `post` of the site as it left them."""


@dataclass(slots=True)
class _Pending:
    """What a site has taken in so far, and from whom. A Scale's `post` is its whole map.

    `stages` are the scales that folded into it, in order.
    """

    pre: Affine | None = None
    post: Affine | None = None
    branches: list[Branch] = field(default_factory=list[Branch])  # of a layer that others were merged into
    contributors: list[int] = field(default_factory=list[int])
    stages: list[_Stage] = field(default_factory=list[_Stage])


class _Absorbed(NamedTuple):
    """A site, the map it takes in, and from which side: "backward" is the map of its output."""

    site: int
    map: Affine
    direction: str


@dataclass(slots=True)
class _Move:
    """One map on its way: where it was absorbed, what it passed, what it costs."""

    absorbed: list[_Absorbed] = field(default_factory=list["_Absorbed"])
    through: list[str] = field(default_factory=list[str])
    adds: int = 0

    def join(self, other: _Move) -> None:
        self.absorbed += other.absorbed
        self.through += [n for n in other.through if n not in self.through]
        self.adds += other.adds


class _Driver:
    """The state of one planning run: the program's use-def chains under the edits made so far."""

    def __init__(
        self,
        program: Program,
        selection: Selection,
        barred: Mapping[tuple[int, int], Refusal],
        refused: Mapping[int, Refusal],
    ):
        self.program, self.selection, self.barred, self.refused = program, selection, barred, refused
        self.records: list[Record] = list(program.records)
        self.operands = [list(inputs_of(r)) for r in self.records]
        self.producer: dict[str, tuple[int, int]] = {}
        self.users: dict[str, list[tuple[int, int]]] = {}
        for i, r in enumerate(self.records):
            for k, v in enumerate(outputs_of(r)):
                self.producer[v] = (i, k)
            for k, v in enumerate(self.operands[i]):
                self.users.setdefault(v, []).append((i, k))
        self.outputs = {v: v for v in program.outputs}  # and under which name a person knows them
        self.pinned = dict(program.pinned)
        self.linears: dict[int, _Pending] = {}
        self.scales: dict[int, _Pending] = {}
        self.folds: dict[int, tuple[str, _Move]] = {}
        self.merges: dict[int, Merge] = {}
        self.refusals: dict[int, tuple[Refusal, ...]] = {}

    # ------------------------------------------------------------------ sweeping

    def sweep(self) -> None:
        """Fold until a pass over all scales changes nothing."""
        moved = True
        while moved:
            moved = False
            for i, r in enumerate(self.records):
                if isinstance(r, Scale) and i not in self.folds and i not in self.refused:
                    moved |= self.selection.allows(r.node) and self._fold(i, r)

    def _fold(self, index: int, scale: Scale) -> bool:
        back = self._backward(self.operands[index][0], scale.map, index)
        if isinstance(back, _Move):
            back = self._worth(scale, back)
        if isinstance(back, _Move):
            self._commit(index, scale, "backward", back)
            return True
        ahead = self._forward(scale.output, scale.map, index)
        if isinstance(ahead, _Move):
            ahead = self._worth(scale, ahead)
        if isinstance(ahead, _Move):
            self._commit(index, scale, "forward", ahead)
            return True
        parted = self._parted(index, scale)
        if parted is not None:
            self._commit(index, scale, "both", parted)
            return True
        self.refusals[index] = tuple(dict.fromkeys((back, ahead)))
        return False

    def _parted(self, index: int, scale: Scale) -> _Move | None:
        """Scale and shift part ways: where neither direction lets both pass, each may let one.

        `s * x + t` is the scale first and the shift behind it, or `s * (x + t / s)`.
        """
        m = scale.map
        if m.no_scale or m.no_shift:
            return None
        ways = [(Affine.of(m.scale, 0.0, m.rank), Affine.of(1.0, m.shift, m.rank))]
        s, t = np.broadcast_arrays(m.scale, m.shift)
        if not ((s == 0) & (t != 0)).any():
            with np.errstate(over="ignore"):
                before = np.divide(t, s, out=np.zeros(t.shape), where=s != 0)
            if np.isfinite(before).all():
                ways.append((Affine.of(1.0, before, m.rank), Affine.of(m.scale, 0.0, m.rank)))
        for behind, ahead in ways:
            back = self._backward(self.operands[index][0], behind, index)
            front = self._forward(scale.output, ahead, index) if isinstance(back, _Move) else back
            if isinstance(back, _Move) and isinstance(front, _Move) and front.absorbed:
                back.join(front)
                if isinstance(self._worth(scale, back), _Move) and not self._narrow(back):
                    return back
        return None

    def _narrow(self, move: _Move) -> bool:
        """Whether the value in between, which no model had before, could leave the range of its type."""
        layers = [r for a in move.absorbed if isinstance(r := self.records[a.site], Linear)]
        return any(r.weight.format is FLOAT16 for r in layers)

    @staticmethod
    def _worth(scale: Scale, move: _Move) -> _Move | Refusal:
        if not move.absorbed:
            return Refusal(Reason.NOT_EXECUTED, scale.output, "nothing reads the result")
        if move.adds < scale.cost:
            return move
        return Refusal(Reason.NO_GAIN, scale.node, "an operation of the same cost would have to be added elsewhere")

    def _commit(self, index: int, scale: Scale, direction: str, move: _Move) -> None:
        for a in move.absorbed:
            self._absorb(*a, index)
        before = self.operands[index][0]
        self.users[before] = [u for u in self.users[before] if u[0] != index]
        self._stand_in(before, scale.output)
        self.folds[index] = (direction, move)
        self.refusals.pop(index, None)

    def _stand_in(self, before: str, after: str) -> None:
        """Let what reads `after`, which is computed no more, read `before`; whoever else knew it now means `before`."""
        for user, k in self.users.get(after, []):
            self.operands[user][k] = before
        self.users[before] += self.users.pop(after, [])
        if after in self.outputs:
            self.outputs[before] = self.outputs[after]
        if after in self.pinned:
            self.pinned[before] = self.pinned[after]

    def _absorb(self, site: int, m: Affine, direction: str, scale: int) -> None:
        record = self.records[site]
        pending = (self.scales if isinstance(record, Scale) else self.linears).setdefault(site, _Pending())
        if isinstance(record, Scale):
            pending.post = m.after(record.map) if direction == "backward" else record.map.after(m)
            self.records[site] = _with_map(record, pending.post)
        elif direction == "backward":
            pending.post = m if pending.post is None else m.after(pending.post)
        else:
            pending.pre = m if pending.pre is None else pending.pre.after(m)
        earlier = self.scales[scale].contributors if scale in self.scales else []
        pending.contributors += [*earlier, scale]
        pending.stages.append((scale, pending.pre, pending.post))

    # ------------------------------------------------------------------ walking

    def _backward(self, value: str, m: Affine, scale: int) -> _Move | Refusal:
        """Make the producer of `value` deliver `m(value)`; its only reader is where the walk comes from."""
        readers = self.users.get(value, [])
        if value in self.outputs:
            name = self.outputs[value]
            return Refusal(Reason.MODEL_OUTPUT, name, f"{name} is an output of the model")
        if value in self.pinned:
            return self.pinned[value]
        if value in self.program.inputs:
            return Refusal(Reason.MODEL_INPUT, value, f"nothing stands before it but {value}")
        if value not in self.producer:
            return Refusal(Reason.UNSUPPORTED_OP, value, f"{value} is a constant that no layer owns")
        index, position = self.producer[value]
        record = self.records[index]
        if len(readers) != 1:
            names = ", ".join(self.records[i].node for i, _ in readers[:3])
            more = f" and {len(readers) - 3} more" if len(readers) > 3 else ""
            return Refusal(Reason.MULTIPLE_CONSUMERS, record.node, f"its output is read by {names}{more}")
        return self._take(index, backward(record, position, m, self.program), scale, "backward")

    def _forward(self, value: str, m: Affine, scale: int) -> _Move | Refusal:
        """Make up for `m`, no longer applied to `value`, in everything that reads it: all or nothing.

        Where nothing reads it there is nothing to make up for.
        """
        if value in self.outputs:
            name = self.outputs[value]
            return Refusal(Reason.MODEL_OUTPUT, name, f"{name} is an output of the model")
        if value in self.pinned:
            return self.pinned[value]
        readers = self.users.get(value, [])
        total = _Move()
        for index, position in readers:
            if len([i for i, _ in readers if i == index]) > 1:
                return Refusal(Reason.MULTIPLE_CONSUMERS, self.records[index].node, "it reads the value twice")
            step = forward(self.records[index], position, m, self.program)
            move = self._take(index, step, scale, "forward")
            if isinstance(move, Refusal):
                return move
            total.join(move)
        return total

    def _push(self, index: int, push: Push, scale: int, direction: str) -> _Move | Refusal:
        if direction == "backward":
            return self._backward(self.operands[index][push.position], push.map, scale)
        return self._forward(outputs_of(self.records[index])[push.position], push.map, scale)

    def _take(self, index: int, step: Step, scale: int, direction: str) -> _Move | Refusal:
        """Follow one record's answer: absorbed here, refused, or the first alternative that succeeds whole."""
        match step:
            case Refusal():
                return step
            case Absorb():
                if (index, scale) in self.barred:
                    return self.barred[index, scale]
                # A bias that an earlier fold had to add is there already.
                pending = self.linears.get(index)
                paid = pending is not None and any(
                    p is not None and not p.no_shift for p in (pending.pre, pending.post)
                )
                return _Move([_Absorbed(index, step.map, direction)], adds=0 if paid else step.adds)
            case _:
                refusal: Refusal | None = None
                for alternative in step:
                    total = _Move(through=[self.records[index].node])
                    for p in alternative:
                        move = self._push(index, p, scale, direction)
                        if isinstance(move, Refusal):
                            refusal = refusal or move
                            break
                        total.join(move)
                    else:
                        return total
                return refusal or Refusal(
                    Reason.UNEQUAL_BRANCHES, self.records[index].node, "no branch can take the map"
                )

    # ------------------------------------------------------------------ merging

    def merge(self) -> bool:
        """Merge what is only added: one pass over the sums; whether any merge was made."""
        before = len(self.merges)
        misfits = {scale for _, scale in self.barred}  # a merge is barred by its sum
        for i, r in enumerate(self.records):
            done = i in self.merges or i in self.refused or i in misfits
            if isinstance(r, Sum) and not done:
                self._merge(i, r)
        return len(self.merges) > before

    def _merge(self, index: int, record: Sum) -> None:
        """Let the layer with the most taps compute the whole sum, when all summands read what it reads."""
        summands = [self._summand(v, index) for v in self.operands[index]]
        layers = [s for s in summands if s is not None and isinstance(self.records[s], Linear)]
        if not layers:
            return
        base = max(layers, key=lambda s: int(np.prod(self._layer(s).weight.shape)))
        x = self.operands[base][0]
        branches: list[Branch] = []
        rank = len(self._layer(base).weight.shape)
        for k, (v, s) in enumerate(zip(self.operands[index], summands, strict=True)):
            if v == x:
                found = [Branch(None, None, None, ())]
            elif s is not None and self.operands[s][0] == x:
                found = self._branches(s)
            else:
                return
            sign = None if record.sign(k) > 0 else Affine.of(-1.0, 0.0, rank)
            branches += composed(found, None, sign)
        placed = [place(self._layer(base), b) for b in branches]
        fitting = [b for b in placed if b is not None]
        if len(fitting) < len(placed) or len(fitting) < 2:
            return
        self._commit_merge(index, record, base, fitting, [s for s in summands if s is not None and s != base])

    def _layer(self, index: int) -> Linear:
        record = self.records[index]
        assert isinstance(record, Linear)
        return record

    def _summand(self, value: str, index: int) -> int | None:
        """The layer or scale that computes the value for this sum alone."""
        alone = len(self.users[value]) == 1 and value not in self.outputs and value not in self.pinned
        producer = self.producer.get(value, (-1, 0))[0]
        if not alone or producer < 0 or producer in self.refused:
            return None
        record = self.records[producer]
        if isinstance(record, Linear):
            return producer if record.geometry is not None and record.frozen is None else None
        return producer if isinstance(record, Scale) and self.selection.allows(record.node) else None

    def _branches(self, index: int) -> list[Branch]:
        record = self.records[index]
        if isinstance(record, Scale):
            return [Branch(None, None, record.map, ())]
        pending = self.linears.get(index, _Pending())
        own = pending.branches or [Branch(self._layer(index), None, None, ())]
        return composed(own, pending.pre, pending.post)

    def _commit_merge(self, index: int, record: Sum, base: int, branches: list[Branch], dropped: list[int]) -> None:
        x, before = self.operands[base][0], self._layer(base).output
        pending = self.linears.setdefault(base, _Pending())
        for d in dropped:
            taken = self.linears.pop(d, None) or self.scales.get(d, _Pending())
            pending.contributors += taken.contributors
            if isinstance(self.records[d], Scale):
                pending.contributors.append(d)
                self.folds[d] = ("merge", _Move([_Absorbed(base, Affine.of(1.0, 0.0, 1), "backward")], [record.node]))
                self.refusals.pop(d, None)
        pending.branches, pending.pre, pending.post = branches, None, None
        pending.stages = [(index, None, None)]
        gone = {index, *dropped}
        self.users[x] = [u for u in self.users[x] if u[0] not in gone]
        self.users[before] = []
        self._stand_in(before, record.output)
        self.merges[index] = Merge(index, base, tuple(dropped))

    # ------------------------------------------------------------------ results

    def edits(self) -> list[Edit] | _Barred:
        """The plan as edits, or the fold that does not fit its stored type."""
        found: dict[int, Edit] = {}
        for site, pending in (*self.linears.items(), *self.scales.items()):
            if site in self.folds:
                continue
            edit = self._edit(site, pending.pre, pending.post, pending.branches)
            if isinstance(edit, Refusal):
                return self._first_misfit(site, pending)
            found[site] = edit
        for site in self.folds:
            if (direction := self._way(site)) != "merge":
                found[site] = Bypass(site, direction)
        found |= self.merges
        return [found[i] for i in sorted(found)]

    def _way(self, site: int) -> str:
        """Where a scale's map went; a scale that took it in backward may itself have gone another way.

        Only what went backward all the way leaves a value that is no longer the one in front of it.
        """
        direction, move = self.folds[site]
        if direction != "backward":
            return direction
        ends = {self._way(a.site) for a in move.absorbed if a.site in self.folds} - {"merge"}
        ends |= {a.direction for a in move.absorbed if a.site not in self.folds}
        return ends.pop() if len(ends) == 1 else "both" if ends else direction

    def taken(self) -> dict[int, tuple[int, ...]]:
        """For each site, the scales whose maps it took in."""
        return {s: tuple(dict.fromkeys(p.contributors)) for s, p in (*self.linears.items(), *self.scales.items())}

    def _edit(self, site: int, pre: Affine | None, post: Affine | None, branches: list[Branch]) -> Edit | Refusal:
        record = self.records[site]
        if isinstance(record, Scale):
            assert post is not None
            return _misfit(record, post) or SetScale(site, post)
        assert isinstance(record, Linear)
        new = solve_merged(record, composed(branches, pre, post)) if branches else solve(record, pre, post)
        return new if isinstance(new, Refusal) else SetLinear(site, new)

    def _first_misfit(self, site: int, pending: _Pending) -> _Barred:
        """The first fold into the site after which its values no longer fit."""
        for scale, pre, post in pending.stages:
            why = self._edit(site, pre, post, pending.branches)
            if isinstance(why, Refusal):
                return _Barred(site, scale, why)
        raise AssertionError("the last stage is what did not fit")

    def report(self) -> Report:
        """Every norm in exactly one of `folded` and `kept`; constant arithmetic that folded under `affine`."""
        norms: list[Norm] = []
        folded: list[Fold] = []
        kept: list[Kept] = []
        affine: list[Fold] = []
        for i, r in enumerate(self.program.records):
            if isinstance(r, Opaque) and r.norm:
                assert r.why is not None, "a norm that stays has a reason"
                norms.append(Norm(r.node, r.op, module=r.module))
                kept.append(Kept(r.node, (r.why,), r.op))
            if not isinstance(r, Scale):
                continue
            if r.is_norm:
                norms.append(Norm(r.node, r.op, r.channels, r.module))
            if i in self.folds:
                move = self.folds[i][1]
                fold = Fold(r.node, tuple(dict.fromkeys(self._homes(move))), tuple(move.through), self._way(i), r.op)
                (folded if r.is_norm else affine).append(fold)
            elif r.is_norm:
                why = self.refused.get(i) or Refusal(Reason.EXCLUDED, r.node, "not selected by --only / --skip")
                kept.append(Kept(r.node, self.refusals.get(i, (why,)), r.op))
        for m in self.merges.values():
            into, names = (self.records[m.base].node,), (self.records[m.site].node,)
            plain = [self.records[d].node for d in m.dropped if isinstance(self.records[d], Linear)]
            folded.append(Fold(None, into, names, "merge", " + ".join(plain) or "identity"))
        return Report(tuple(norms), tuple(folded), tuple(kept), tuple(affine))

    def _homes(self, move: _Move) -> Iterable[str]:
        """Where a map ended up: a scale that absorbed it may itself have moved on."""
        for site, _, _ in move.absorbed:
            if site in self.folds:
                yield from self._homes(self.folds[site][1])
            else:
                yield self.records[site].node


def _with_map(record: Scale, total: Affine) -> Scale:
    cost = record.cost if record.is_norm else cost_of(record.kind, total)
    return dataclasses.replace(record, map=total, cost=cost)


def _misfit(record: Scale, m: Affine) -> Refusal | None:
    """Why the Scale's format cannot hold the map."""
    fmt, written = record.format, m.scale * np.sqrt(1 + record.epsilon)
    if not all((np.abs(a) <= fmt.max_finite).all() for a in (written, m.shift)):
        return Refusal(Reason.OVERFLOW, record.node, f"the folded map does not fit into {fmt.name}")
    if ((m.scale != 0) & (np.abs(m.scale) <= fmt.smallest_subnormal / 2)).any():
        return Refusal(Reason.UNDERFLOW, record.node, f"a folded scale becomes zero in {fmt.name}")
    return None
