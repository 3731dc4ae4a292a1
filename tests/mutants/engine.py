"""Mutants of the rules by which maps pass records, and of the driver that plans folds."""

from __future__ import annotations

from .mutant import Mutant

RULES = [
    Mutant(
        "embedding-input", "rules.py",
        "            if record.index_input:",
        "            if False:",
    ),
    Mutant(
        "shift-through-zero-padding", "rules.py",
        "if not record.uniform_taps and not m.no_shift:",
        "if False:",
    ),
    Mutant(
        "linear-takes-any-axis", "folding.py",
        "        self.records: list[Record] = list(program.records)",
        "        self.records: list[Record] = [\n"
        "            dataclasses.replace(r, out_axis=-1) if isinstance(r, Linear) and r.out_axis == -2 else r\n"
        "            for r in program.records\n        ]",
    ),
    Mutant(
        "linear-not-per-channel", "affine.py",
        "        if self.varying - {axis % self.rank}:\n            return None\n",
        "        if self.scale.size not in (1, size) or self.shift.size not in (1, size):\n            return None\n",
    ),
    Mutant(
        "carry-without-no-shift", "rules.py",
        "if Need.NO_SHIFT in record.needs and not m.no_shift:",
        "if False:",
    ),
    Mutant(
        "carry-without-positive", "rules.py",
        "if Need.POSITIVE in record.needs and not m.positive:",
        "if False:",
    ),
    Mutant(
        "relu-passes-zero", "rules.py",
        "if Need.POSITIVE in record.needs and not m.positive:",
        "if Need.POSITIVE in record.needs and not m.nonnegative:",
    ),
    Mutant(
        "carry-without-nonnegative", "rules.py",
        "if Need.NONNEGATIVE in record.needs and not m.nonnegative:",
        "if False:",
    ),
    Mutant(
        "carry-without-mixed", "rules.py",
        "    if m.varying & record.mixed:",
        "    if False:",
    ),
    Mutant(
        "transpose-not-inverted", "rules.py",
        "m.transpose(np.argsort(record.order).tolist())",
        "m.transpose(record.order)",
    ),
    Mutant(
        "concat-parts-swapped", "rules.py",
        "parts = [np.arange(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]",
        "parts = [np.arange(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)][::-1]",
    ),
    Mutant(
        "concat-offset-forgotten", "rules.py",
        "    start = sum(sizes[:position])",
        "    start = 0",
    ),
    Mutant(
        "take-repeats-channel", "rules.py",
        "    if len(np.unique(indices)) < len(indices):",
        "    if False:",
    ),
    Mutant(
        "take-overlaps-other-output", "rules.py",
        "    if any(np.intersect1d(indices, o).size for o in others):",
        "    if False:",
    ),
    Mutant(
        "take-ignores-other-outputs", "rules.py",
        "    if len(record.indices) == 1 and record.axis % m.rank not in m.varying:",
        "    if record.axis % m.rank not in m.varying:",
    ),
    Mutant(
        "take-in-order", "rules.py",
        "return a if a.shape[axis] == 1 else a.take(indices, axis)",
        "return a if a.shape[axis] == 1 else a.take(np.sort(indices), axis)",
    ),
    Mutant(
        "take-embeds-in-front", "rules.py",
        "np.moveaxis(full, axis, 0)[indices] = np.moveaxis(a, axis, 0)",
        "np.moveaxis(full, axis, 0)[: len(indices)] = np.moveaxis(a, axis, 0)",
    ),
    Mutant(
        "sum-shifts-every-branch", "rules.py",
        "Push(i, taken[i] if i == taker else scale) for i in count",
        "Push(i, taken[i]) for i in count",
    ),
    Mutant(
        "sum-scales-one-branch", "rules.py",
        "        return [tuple(Push(i, m) for i in count)]",
        "        return [(Push(i, m),) for i in count]",
    ),
    Mutant(
        "sum-shift-repeated", "rules.py",
        "        return [(Push(i, _signed(m, record.sign(i))),) for i in count]",
        "        return [tuple(Push(i, _signed(m, record.sign(i))) for i in count)]",
    ),
    Mutant(
        "difference-takes-shift-unchanged", "rules.py",
        "    return m if sign > 0 else Affine.of(m.scale, -m.shift, m.rank)",
        "    return m",
    ),
    Mutant(
        "sum-forward-scales", "rules.py",
        "            if not m.no_scale:\n",
        "            if False:\n",
    ),
    Mutant(
        "sum-broadcasts", "rules.py",
        "    return all(shape[i] == sizes[i] for i in m.varying)",
        "    return True",
    ),
    Mutant(
        "product-takes-shift", "rules.py",
        'lets only a scale pass")\n            return [(Push(i, m),) for i, v',
        'lets only a scale pass") if False else [(Push(i, m),) for i, v',
    ),
    Mutant(
        "product-forward-takes-shift", "rules.py",
        'lets only a scale pass")\n            return _broadcast(record, m, program)',
        'lets only a scale pass") if False else _broadcast(record, m, program)\n'
        "            return _broadcast(record, m, program)",
    ),
    Mutant(
        "product-scales-both", "rules.py",
        "return [(Push(i, m),) for i, v in enumerate(record.inputs) if _fits(m, program, v)]",
        "return [tuple(Push(i, m) for i, v in enumerate(record.inputs))]",
    ),
    Mutant(
        "scale-composed-in-front", "folding.py",
        'm.after(record.map) if direction == "backward" else record.map.after(m)',
        "record.map.after(m)",
    ),
    Mutant(
        "scale-composed-behind", "folding.py",
        'm.after(record.map) if direction == "backward" else record.map.after(m)',
        "m.after(record.map)",
    ),
    Mutant(
        "norm-along-another-axis", "rules.py",
        "    if total.vectors(axis, record.channels) is None:",
        "    if False:",
    ),
    Mutant(
        "unknown-paired-with-unknown", "affine.py",
        "        if isinstance(a, str) and a == b:",
        "        if not isinstance(a, int) and a == b:",
    ),
    Mutant(
        "shift-not-scaled", "affine.py",
        "self.scale * first.shift + self.shift",
        "first.shift + self.shift",
    ),
    Mutant(
        "reshape-drops-order", "affine.py",
        "np.broadcast_to(scale, full).reshape(shape), np.broadcast_to(shift, full).reshape(shape), len(shape)",
        "np.broadcast_to(scale, full).reshape(shape, order='F'), np.broadcast_to(shift, full).reshape(shape), "
        "len(shape)",
    ),
]  # fmt: skip

FOLDING = [
    Mutant(
        "consumers-not-counted", "folding.py",
        "        if len(readers) != 1:",
        "        if not readers:",
    ),
    Mutant(
        "output-changed-backward", "folding.py",
        "        readers = self.users.get(value, [])\n        if value in self.outputs:",
        "        readers = self.users.get(value, [])\n        if False:",
    ),
    Mutant(
        "output-changed-forward", "folding.py",
        'nothing to make up for.\n        """\n        if value in self.outputs:',
        'nothing to make up for.\n        """\n        if False:',
    ),
    Mutant(
        "captured-value-changed", "folding.py",
        "            return self.pinned[value]\n        if value in self.program.inputs:",
        "            pass\n        if value in self.program.inputs:",
    ),
    Mutant(
        "one-reader-is-enough", "folding.py",
        "                return move\n            total.join(move)\n        return total\n\n    def _push",
        "                continue\n            total.join(move)\n        return total\n\n    def _push",
    ),
    Mutant(
        "reads-twice", "folding.py",
        "            if len([i for i, _ in readers if i == index]) > 1:",
        "            if False:",
    ),
    Mutant(
        "stale-weight-behind", "folding.py",
        "            pending.post = m if pending.post is None else m.after(pending.post)",
        "            pending.post = m",
    ),
    Mutant(
        "stale-weight-before", "folding.py",
        "            pending.pre = m if pending.pre is None else pending.pre.after(m)",
        "            pending.pre = m",
    ),
    Mutant(
        "maps-in-wrong-order-behind", "folding.py",
        "m if pending.post is None else m.after(pending.post)",
        "m if pending.post is None else pending.post.after(m)",
    ),
    Mutant(
        "maps-in-wrong-order-before", "folding.py",
        "m if pending.pre is None else pending.pre.after(m)",
        "m if pending.pre is None else m.after(pending.pre)",
    ),
    Mutant(
        "scale-map-not-updated", "folding.py",
        "            self.records[site] = _with_map(record, pending.post)",
        "            pass",
    ),
    Mutant(
        "readers-lost", "folding.py",
        "        self.users[before] += self.users.pop(after, [])",
        "        self.users.pop(after, [])",
    ),
    Mutant(
        "output-not-handed-on", "folding.py",
        "        if after in self.outputs:\n",
        "        if False:\n",
    ),
    Mutant(
        "capture-not-handed-on", "folding.py",
        "        if after in self.pinned:\n",
        "        if False:\n",
    ),
    Mutant(
        "costs-as-much", "folding.py",
        "        if move.adds < scale.cost:",
        "        if True:",
    ),
    Mutant(
        "parted-shift-not-divided", "folding.py",
        "ways.append((Affine.of(1.0, before, m.rank), Affine.of(m.scale, 0.0, m.rank)))",
        "ways.append((Affine.of(1.0, m.shift, m.rank), Affine.of(m.scale, 0.0, m.rank)))",
    ),
    Mutant(
        "parted-by-zero", "folding.py",
        "        if not ((s == 0) & (t != 0)).any():",
        "        if True:",
    ),
    Mutant(
        "parted-in-float16", "folding.py",
        "and not self._narrow(back):",
        "and True:",
    ),
    Mutant(
        "excluded-norm-folds", "folding.py",
        "                    moved |= self.selection.allows(r.node) and self._fold(i, r)",
        "                    moved |= self._fold(i, r)",
    ),
    Mutant(
        "scale-overflows", "folding.py",
        "    if not all((np.abs(a) <= fmt.max_finite).all() for a in (written, m.shift)):",
        "    if False:",
    ),
    Mutant(
        "nothing-reads-it", "folding.py",
        "        if not move.absorbed:\n",
        "        if False:\n",
    ),
]  # fmt: skip
