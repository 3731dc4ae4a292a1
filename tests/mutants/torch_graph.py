"""Mutants of what reads and writes torch graphs."""

from __future__ import annotations

from .mutant import Mutant

TORCH = [
    Mutant(
        "torch-transposed-as-conv", "graphs/torch_layers.py",
        "        out_dim=1 if transposed else 0,",
        "        out_dim=0,",
    ),
    Mutant(
        "torch-transposed-takes-shift", "graphs/torch_layers.py",
        "        uniform_taps=not transposed and _unpadded(",
        "        uniform_taps=_unpadded(",
    ),
    Mutant(
        "torch-same-padding-ignored", "graphs/torch_layers.py",
        '        return padding == "valid" or all(k == 1 for k in kernel)',
        "        return True",
    ),
    Mutant(
        "torch-groups-ignored", "graphs/torch_layers.py",
        'groups=n.args["groups"],',
        "groups=1,",
    ),
    Mutant(
        "torch-addmm-alpha-ignored", "graphs/torch_layers.py",
        'alpha=float(n.args["alpha"]), beta=float(n.args["beta"])',
        'alpha=1.0, beta=float(n.args["beta"])',
    ),
    Mutant(
        "torch-batch-statistics-accepted", "graphs/torch_layers.py",
        "    if trains:\n",
        "    if False:\n",
    ),
    Mutant(
        "torch-alpha-of-add-ignored", "graphs/torch_layers.py",
        '    alpha = float(n.args.get("alpha", 1))',
        "    alpha = 1.0",
    ),
    Mutant(
        "torch-rounded-division", "graphs/torch_layers.py",
        'n.args.get("rounding_mode") or ',
        "",
    ),
    Mutant(
        "torch-norm-axis", "graphs/torch_layers.py",
        "    axis = rank - 2 if instance and rank == 2 else 1\n",
        "    axis = rank - 1\n",
    ),
    Mutant(
        "torch-relu-takes-shift", "graphs/torch_layout.py",
        "_HOMOGENEOUS = frozenset({Need.POSITIVE, Need.NO_SHIFT})",
        "_HOMOGENEOUS = frozenset({Need.POSITIVE})",
    ),
    Mutant(
        "torch-max-takes-negative", "graphs/torch_layout.py",
        "_MAXIMUM = frozenset({Need.NONNEGATIVE})",
        "_MAXIMUM = frozenset[Need]()",
    ),
    Mutant(
        "torch-average-counts-padding", "graphs/torch_layout.py",
        '(padded and n.args.get("count_include_pad", True)) or n.args.get("divisor_override")',
        'n.args.get("divisor_override")',
    ),
    Mutant(
        "torch-divisor-ignored", "graphs/torch_layout.py",
        ' or n.args.get("divisor_override")',
        "",
    ),
    Mutant(
        "torch-pad-value-ignored", "graphs/torch_layout.py",
        "    if isinstance(value, fx.Node) or value != 0:",
        "    if False:",
    ),
    Mutant(
        "torch-pixel-shuffle-order", "graphs/torch_layout.py",
        "(batch, c // (r * r), r, r, h, w), (0, 1, 4, 2, 5, 3)",
        "(batch, r, r, c // (r * r), h, w), (0, 3, 4, 1, 5, 2)",
    ),
    Mutant(
        "torch-channel-shuffle-order", "graphs/torch_layout.py",
        "    return _shuffled(n, (batch, g, c // g, *rest), order)",
        "    return _shuffled(n, (batch, c // g, g, *rest), order)",
    ),
    Mutant(
        "torch-permute-negative", "graphs/torch_layout.py",
        'order = [d % rank for d in n.args["dims"]]',
        'order = [abs(d) for d in n.args["dims"]]',
    ),
    Mutant(
        "torch-difference-as-sum", "graphs/torch_layout.py",
        '(1, -1) if n.op == "sub" else ()',
        "()",
    ),
    Mutant(
        "torch-alpha-of-sum-ignored", "graphs/torch_layout.py",
        '    if n.args.get("alpha", 1) != 1:\n        return n.opaque()\n    return Sum(',
        "    return Sum(",
    ),
    Mutant(
        "torch-pieces-from-front", "graphs/torch_layout.py",
        "np.arange(ends[k] - sizes[k], ends[k])",
        "np.arange(sizes[k])",
    ),
    Mutant(
        "torch-narrow-start-ignored", "graphs/torch_layout.py",
        "np.arange(size)[start:][:length]",
        "np.arange(size)[:length]",
    ),
    Mutant(
        "torch-tied-parameter", "graphs/torch_tree.py",
        "        if id(own) in self.tied or (isinstance(weight, fx.Node) and len(weight.users) != 1):",
        "        if isinstance(weight, fx.Node) and len(weight.users) != 1:",
    ),
    Mutant(
        "torch-weight-read-twice", "graphs/torch_tree.py",
        "        if id(own) in self.tied or (isinstance(weight, fx.Node) and len(weight.users) != 1):",
        "        if id(own) in self.tied:",
    ),
    Mutant(
        "torch-norm-called-twice", "graphs/torch_tree.py",
        '        if module is None or not path or f"{path}#2" in self.calls or',
        "        if module is None or not path or",
    ),
    Mutant(
        "torch-activation-lost", "graphs/torch_tree.py",
        "            if not names or names[-1] != child:\n                names.append(child)",
        "            pass",
    ),
    Mutant(
        "torch-bias-ignored-by-layer", "graphs/torch_tree.py",
        "        if _is_torchs_own(module) or self._honours_bias(module, record, node):",
        "        if True:",
    ),
    Mutant(
        "torch-overwritten-input", "graphs/torch_tree.py",
        '        if direction == "forward" and _overwritten(record, site):',
        "        if False:",
    ),
    Mutant(
        "torch-norm-epsilon-not-undone", "graphs/torch_tree.py",
        "vectors[0] * np.sqrt(1 + module.eps)",
        "vectors[0]",
    ),
    Mutant(
        "torch-shared-weight-in-place", "graphs/torch_writer.py",
        "        alone = isinstance(old, fx.Node) and len(old.users) == 1",
        "        alone = isinstance(old, fx.Node)",
    ),
    Mutant(
        "torch-beta-kept", "graphs/torch_writer.py",
        "            if record.beta != 1:",
        "            if False:",
    ),
    Mutant(
        "torch-in-place-kept", "graphs/torch_capture.py",
        "    if not any(map(_mutates, ep.graph.nodes)):",
        "    if True:",
    ),
    Mutant(
        "torch-hook-not-told", "graphs/torch_tree.py",
        "        if m._forward_hooks or m._forward_pre_hooks:\n            hooked.add(path)",
        "        pass",
    ),
]  # fmt: skip
