"""Mutants of what reads and writes ONNX graphs, and of what both graphs share."""

from __future__ import annotations

from .mutant import Mutant

SITES = [
    Mutant(
        "bias-of-read-product", "graphs/sites.py",
        "    return not r.free_bias and r.bias is None and r.out_axis == -1 and r.output in alone",
        "    return not r.free_bias and r.bias is None and r.out_axis == -1",
    ),
    Mutant(
        "difference-as-bias", "graphs/sites.py",
        'or r.op != "Add":',
        "or False:",
    ),
    Mutant(
        "norm-without-its-gamma", "graphs/sites.py",
        "        for k in chain[1:]:\n            total = scales[k].map.after(total)",
        "        for k in chain[-1:]:\n            total = scales[k].map.after(total)",
    ),
    Mutant(
        "norm-of-read-value", "graphs/sites.py",
        "    reader = {r.input: i for i, r in scales.items() if r.input in alone}",
        "    reader = {r.input: i for i, r in scales.items()}",
    ),
]  # fmt: skip

ONNX = [
    Mutant(
        "transposed-as-conv", "graphs/onnx_layers.py",
        "out_dim=1 if transposed else 0, in_axis=1, out_axis=1, groups=groups,",
        "out_dim=0, in_axis=1, out_axis=1, groups=groups,",
    ),
    Mutant(
        "transposed-takes-shift", "graphs/onnx_layers.py",
        "uniform_taps=unpadded and not transposed,",
        "uniform_taps=unpadded,",
    ),
    Mutant(
        "auto-pad-ignored", "graphs/onnx_layers.py",
        '    unpadded = n.attr("auto_pad", "NOTSET") in ("NOTSET", "VALID") and not any(pads)',
        "    unpadded = not any(pads)",
    ),
    Mutant(
        "pads-behind-ignored", "graphs/onnx_layers.py",
        "and not any(pads)\n",
        "and not any(pads[: len(pads) // 2])\n",
    ),
    Mutant(
        "geometry-pads-paired", "graphs/onnx_layers.py",
        "    return Geometry(kernel, stride, dilation, pads[:rank], pads[rank:])",
        "    return Geometry(kernel, stride, dilation, pads[::2], pads[1::2])",
    ),
    Mutant(
        "trans-b-ignored", "graphs/onnx_layers.py",
        'out_dim=0 if n.attr("transB", 0) else 1,',
        "out_dim=1,",
    ),
    Mutant(
        "trans-a-ignored", "graphs/onnx_layers.py",
        'in_axis=0 if n.attr("transA", 0) else 1,',
        "in_axis=1,",
    ),
    Mutant(
        "gemm-alpha-ignored", "graphs/onnx_layers.py",
        'alpha=n.attr("alpha", 1.0)',
        "alpha=1.0",
    ),
    Mutant(
        "gemm-beta-ignored", "graphs/onnx_layers.py",
        'beta=n.attr("beta", 1.0)',
        "beta=1.0",
    ),
    Mutant(
        "matmul-sides-swapped", "graphs/onnx_layers.py",
        "    axis = -1 if x == 0 else -2",
        "    axis = -1",
    ),
    Mutant(
        "matmul-bias-free", "graphs/onnx_layers.py",
        "return _linear(n, weight, None, x, out_dim=x ^ 1, in_axis=axis, out_axis=axis, free_bias=False)",
        "return _linear(n, weight, None, x, out_dim=x ^ 1, in_axis=axis, out_axis=axis)",
    ),
    Mutant(
        "training-mode-accepted", "graphs/onnx_layers.py",
        '    if n.scope.opset >= 14 and n.attr("training_mode", 0):',
        "    if False:",
    ),
    Mutant(
        "training-outputs-accepted", "graphs/onnx_layers.py",
        "    if n.scope.opset < 14 and any(n.proto.output[1:]):",
        "    if False:",
    ),
    Mutant(
        "epsilon-default-wrong", "graphs/onnx_layers.py",
        'n.attr("epsilon", 1e-5)',
        'n.attr("epsilon", 1e-3)',
    ),
    Mutant(
        "dynamic-statistics-accepted", "graphs/onnx_layers.py",
        '(n.op == "Div" and k == 0)',
        "False",
    ),
    Mutant(
        "difference-reversed", "graphs/onnx_layers.py",
        "return Affine.of(1.0, -c, rank) if position == 1 else Affine.of(-1.0, c, rank)",
        "return Affine.of(1.0, -c, rank)",
    ),
    Mutant(
        "quotient-as-product", "graphs/onnx_layers.py",
        "return Affine.of(1 / c, 0.0, rank)",
        "return Affine.of(c, 0.0, rank)",
    ),
    Mutant(
        "constant-broadcasts-result", "graphs/onnx_layers.py",
        "or not _keeps_shape(c.shape, shape):",
        "or False:",
    ),
    Mutant(
        "dropout-that-drops", "graphs/onnx_layout.py",
        "(training is None or bool(training.load().any()))",
        "False",
    ),
    Mutant(
        "prelu-of-computed-slope", "graphs/onnx_layout.py",
        "keeps = slope is not None and shape is not None and len(slope.shape) <= len(shape)",
        "keeps = slope is None or (shape is not None and len(slope.shape) <= len(shape))",
    ),
    Mutant(
        "relu-takes-shift", "graphs/onnx_layout.py",
        "_HOMOGENEOUS = frozenset({Need.POSITIVE, Need.NO_SHIFT})",
        "_HOMOGENEOUS = frozenset({Need.POSITIVE})",
    ),
    Mutant(
        "relu-takes-negative", "graphs/onnx_layout.py",
        "_HOMOGENEOUS = frozenset({Need.POSITIVE, Need.NO_SHIFT})",
        "_HOMOGENEOUS = frozenset({Need.NO_SHIFT})",
    ),
    Mutant(
        "max-pool-takes-negative", "graphs/onnx_layout.py",
        "    return _carry(n, frozenset({Need.NONNEGATIVE}), spatial)\n\n\ndef average_pool",
        "    return _carry(n, frozenset(), spatial)\n\n\ndef average_pool",
    ),
    Mutant(
        "max-pool-indices-read", "graphs/onnx_layout.py",
        "    if spatial is None or any(n.proto.output[1:]):",
        "    if spatial is None:",
    ),
    Mutant(
        "average-counts-padding", "graphs/onnx_layout.py",
        '    zeros = n.attr("count_include_pad", 0) and (padded or n.attr("ceil_mode", 0))',
        "    zeros = False",
    ),
    Mutant(
        "max-over-channels", "graphs/onnx_layout.py",
        "    mixed = frozenset(a % len(shape) for a in axes)\n    needs",
        "    mixed = frozenset(a for a in axes)\n    needs",
    ),
    Mutant(
        "sum-takes-shift", "graphs/onnx_layout.py",
        '"ReduceSum": frozenset({Need.NO_SHIFT})',
        '"ReduceSum": frozenset[Need]()',
    ),
    Mutant(
        "difference-as-sum", "graphs/onnx_layout.py",
        '(1, -1) if n.op == "Sub" else ()',
        "()",
    ),
    Mutant(
        "pad-value-ignored", "graphs/onnx_layout.py",
        "    if value != 0:\n",
        "    if False:\n",
    ),
    Mutant(
        "pad-takes-shift", "graphs/onnx_layout.py",
        "    return _carry(n, frozenset({Need.NO_SHIFT}), mixed)\n\n\ndef resize",
        "    return _carry(n, frozenset(), mixed)\n\n\ndef resize",
    ),
    Mutant(
        "padded-channels-not-mixed", "graphs/onnx_layout.py",
        "zip(axes, pads[:half], pads[half:], strict=False) if lo or hi)",
        "zip(axes, pads[:half], pads[half:], strict=False) if a > 1 and (lo or hi))",
    ),
    Mutant(
        "depth-to-space-modes-swapped", "graphs/onnx_layout.py",
        '    if n.attr("mode", "DCR") == "DCR":',
        '    if n.attr("mode", "CRD") == "DCR":',
    ),
    Mutant(
        "space-to-depth-order", "graphs/onnx_layout.py",
        "(0, 3, 5, 1, 2, 4))",
        "(0, 1, 3, 5, 2, 4))",
    ),
    Mutant(
        "split-pieces-swapped", "graphs/onnx_layout.py",
        "    pieces = tuple(np.arange(e - s, e) for s, e in zip(sizes, ends, strict=True))",
        "    pieces = tuple(np.arange(e - s, e) for s, e in zip(sizes, ends, strict=True))[::-1]",
    ),
    Mutant(
        "slice-step-ignored", "graphs/onnx_layout.py",
        "np.arange(size)[start:end:step]",
        "np.sort(np.arange(size)[start:end:step])",
    ),
    Mutant(
        "negative-index-taken-as-first", "graphs/onnx_layout.py",
        ".astype(np.int64) % max(size, 1)",
        ".astype(np.int64).clip(0)",
    ),
    Mutant(
        "shared-weight-in-place", "graphs/onnx_writer.py",
        "index.readers(scope, old) == 1 and",
        "",
    ),
    Mutant(
        "gemm-beta-kept", "graphs/onnx_writer.py",
        '            _remove_attribute(last, "beta")',
        "            pass",
    ),
    Mutant(
        "norm-epsilon-not-undone", "graphs/onnx_writer.py",
        "vectors[0] * np.sqrt(1 + float(np.float32(epsilon)))",
        "vectors[0]",
    ),
    Mutant(
        "result-renamed", "graphs/onnx_writer.py",
        '        if direction == "backward":\n            self._index.rename(scope, x, y)',
        "        pass",
    ),
    Mutant(
        "add-in-front-of-mul", "graphs/onnx_writer.py",
        '        parts += [("Add", m.shift)] if not m.no_shift or not parts else []',
        '        parts = ([("Add", m.shift)] if not m.no_shift or not parts else []) + parts',
    ),
    Mutant(
        "constants-left-behind", "graphs/onnx_writer.py",
        "    def _release(self, scope: Scope, names: Iterable[str]) -> None:\n",
        "    def _release(self, scope: Scope, names: Iterable[str]) -> None:\n        return\n",
    ),
    Mutant(
        "capture-not-pinned", "graphs/onnx_lift.py",
        "        if self.homes[name] is not self.current:",
        "        if False:",
    ),
    Mutant(
        "shape-counts-as-reader", "graphs/onnx_lift.py",
        '"Shape": 0, ',
        "",
    ),
    Mutant(
        "overridable-taken-as-constant", "graphs/onnx_constants.py",
        "(home.parent is None and name in self._overridable)",
        "False",
    ),
    Mutant(
        "random-weights-are-constant", "graphs/onnx_constants.py",
        '"RandomNormalLike", "RandomUniformLike", "Multinomial",',
        '"RandomUniformLike", "Multinomial",',
    ),
]  # fmt: skip
