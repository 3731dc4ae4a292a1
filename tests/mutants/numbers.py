"""Mutants of what computes weights: norms, layers, roundings, merged branches."""

from __future__ import annotations

from .mutant import Mutant

WEIGHTS = [
    Mutant(
        "factor-on-wrong-dimension", "weights.py",
        '    dim = site.out_dim if side == "out" else 1 - site.out_dim',
        '    dim = site.out_dim if side == "in" else 1 - site.out_dim',
    ),
    Mutant(
        "group-factor-on-wrong-dimension", "weights.py",
        "    shape = [site.groups, *[1] * len(site.weight.shape)]\n",
        "    shape = [1, *[1] * len(site.weight.shape)]\n"
        "    if site.groups > 1 and vector.size != site.weight.shape[dim]:\n"
        "        vector = vector[: site.weight.shape[dim]]\n",
    ),
    Mutant(
        "alpha-dropped", "weights.py",
        "        if site.alpha != 1:",
        "        if False:",
    ),
    Mutant(
        "beta-dropped", "weights.py",
        "total.add_product(old, np.asarray(site.beta, np.float64))",
        "total.add_product(old, np.asarray(1.0, np.float64))",
    ),
    Mutant(
        "bias-forgotten", "weights.py",
        "    if old is not None:\n        total.add_product",
        "    if False:\n        total.add_product",
    ),
    Mutant(
        "bias-not-scaled", "weights.py",
        "        total.add_product(old, np.asarray(site.beta, np.float64))\n    if s_out is not None:",
        "        total.add_product(old, np.asarray(site.beta, np.float64))\n    if False:",
    ),
    Mutant(
        "shift-not-summed-over-taps", "weights.py",
        "    taps = int(np.prod(rows.shape[3:]))\n",
        "    taps = int(np.prod(rows.shape[3:]))\n    rows = rows / taps\n",
    ),
    Mutant(
        "shift-of-other-group", "weights.py",
        "    vector = t_in.reshape(site.groups, 1, -1)[block.groups]",
        "    vector = t_in.reshape(site.groups, 1, -1)[::-1][block.groups]",
    ),
    Mutant(
        "table-not-shifted", "weights.py",
        "            total.scale(s_out)\n        if t_out is not None:",
        "            total.scale(s_out)\n        if False:",
    ),
    Mutant(
        "bias-overflow-unchecked", "weights.py",
        "    if not np.isfinite(bias).all():",
        "    if False:",
    ),
    Mutant(
        "weight-overflow-unchecked", "weights.py",
        "            if reason is not None:\n                return _weight_problem(site, reason)\n",
        "",
    ),
    Mutant(
        "rounded-twice", "rounding.py",
        "    doubtful = np.abs(product - nearest) >= unit * (2.0**-target.precision - 2.0**-50)",
        "    doubtful = np.zeros(product.shape, bool)",
    ),
    Mutant(
        "cast-twice", "rounding.py",
        "    for f in factors[1:]:\n        product = product * f\n",
        "    for f in factors[1:]:\n        product = (product * f).astype(np.float32).astype(np.float64)\n",
    ),
    Mutant(
        "epsilon-ignored", "norms.py",
        "    scale = 1 / np.sqrt(variance + epsilon)",
        "    scale = 1 / np.sqrt(variance)",
    ),
    Mutant(
        "variance-not-rooted", "norms.py",
        "    scale = 1 / np.sqrt(variance + epsilon)",
        "    scale = 1 / (variance + epsilon)",
    ),
    Mutant(
        "gamma-ignored", "norms.py",
        "        scale = gamma * scale",
        "        pass",
    ),
    Mutant(
        "mean-added", "norms.py",
        "    shift = -mean * scale",
        "    shift = mean * scale",
    ),
    Mutant(
        "mean-not-scaled", "norms.py",
        "    shift = -mean * scale",
        "    shift = -mean",
    ),
    Mutant(
        "negative-variance-accepted", "norms.py",
        "variance + epsilon <= 0)",
        "variance + epsilon < 0)",
    ),
]  # fmt: skip

MERGING = [
    Mutant(
        "merge-with-other-stride", "merging.py",
        "    if h is None or h.stride != g.stride or h.span != g.span:",
        "    if h is None or h.span != g.span:",
    ),
    Mutant(
        "merge-with-other-size", "merging.py",
        "    if h is None or h.stride != g.stride or h.span != g.span:",
        "    if h is None or h.stride != g.stride:",
    ),
    Mutant(
        "merge-off-centre", "merging.py",
        "        start, stride = first // d, step // d",
        "        start, stride = 0, step // d",
    ),
    Mutant(
        "merge-between-taps", "merging.py",
        "        if first % d or step % d:",
        "        if False:",
    ),
    Mutant(
        "merge-shifts-every-branch", "merging.py",
        "        behind = post if post is None or k == 0 else Affine.of(post.scale, 0.0, post.rank)",
        "        behind = post",
    ),
    Mutant(
        "merge-identity-with-other-channels", "merging.py",
        "        return base.in_channels == base.out_channels and along",
        "        return along",
    ),
    Mutant(
        "merge-adds-connections", "merging.py",
        "    return same and other.groups % base.groups == 0 and other.weight.format is base.weight.format",
        "    return same and other.weight.format is base.weight.format",
    ),
    Mutant(
        "merge-forgets-bias", "merging.py",
        "        if b.layer is not None and b.layer.bias is not None:",
        "        if False:",
    ),
    Mutant(
        "merge-forgets-shift-before", "merging.py",
        "        if t_in.any():",
        "        if False:",
    ),
    Mutant(
        "merge-scales-shift-late", "merging.py",
        "        shift.scale(s_out)\n        shift.add(t_out)",
        "        shift.add(t_out)\n        shift.scale(s_out)",
    ),
    Mutant(
        "merge-group-misplaced", "merging.py",
        "        start = first - o // (base.out_channels // base.groups) * size",
        "        start = 0",
    ),
    Mutant(
        "merge-of-read-branch", "folding.py",
        "        alone = len(self.users[value]) == 1 and value not in self.outputs and value not in self.pinned",
        "        alone = value not in self.outputs and value not in self.pinned",
    ),
    Mutant(
        "merge-of-output-branch", "folding.py",
        "        alone = len(self.users[value]) == 1 and value not in self.outputs and value not in self.pinned",
        "        alone = len(self.users[value]) == 1 and value not in self.pinned",
    ),
    Mutant(
        "merge-drops-norm", "folding.py",
        "            return [Branch(None, None, record.map, ())]",
        "            return [Branch(None, None, None, ())]",
    ),
    Mutant(
        "merge-of-difference-as-sum", "folding.py",
        "            sign = None if record.sign(k) > 0 else",
        "            sign = None if True else",
    ),
    Mutant(
        "merge-of-another-input", "folding.py",
        "            elif s is not None and self.operands[s][0] == x:",
        "            elif s is not None:",
    ),
    Mutant(
        "merge-overflow-unchecked", "merging.py",
        "    if not (np.isfinite(new_weight).all() and np.isfinite(new_bias).all()):",
        "    if False:",
    ),
]  # fmt: skip
