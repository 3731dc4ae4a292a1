"""Networks of published checkpoints that come without their code, written from the papers and the keys in the files.

ResNets for CIFAR-10 (He et al., 2015, section 4.2, option A: shortcuts without parameters) and LPRNet (Zherzdev and
Gruzdev, 2018), which pools over channels as well as over space; the ultra-light face detectors, whose ONNX files show
what their layers are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions; where the shape changes, the shortcut skips pixels and fills channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, (outputs - inputs) // 2

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """6n+2 layers: 20 for n = 3, 56 for n = 9."""

    def __init__(self, n: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        for stage, (inputs, outputs) in enumerate(((16, 16), (16, 32), (32, 64)), start=1):
            blocks = [Block(inputs if k == 0 else outputs, outputs, 2 if k == 0 and stage > 1 else 1) for k in range(n)]
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


class SmallBasic(nn.Module):
    """LPRNet's block: a 3x3 convolution taken apart, between two 1x1 that narrow and widen."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        narrow = outputs // 4
        self.block = nn.Sequential(
            nn.Conv2d(inputs, narrow, 1), nn.ReLU(), nn.Conv2d(narrow, narrow, (3, 1), padding=(1, 0)), nn.ReLU(),
            nn.Conv2d(narrow, narrow, (1, 3), padding=(0, 1)), nn.ReLU(), nn.Conv2d(narrow, outputs, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.block(x)


class LprNet(nn.Module):
    """Plates of 94 x 24 pixels to 18 positions of 68 characters."""

    KEPT = (2, 6, 13, 22)  # whose values join at the end

    def __init__(self, characters: int = 68):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool3d((1, 3, 3), (1, 1, 1)),
            SmallBasic(64, 128), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool3d((1, 3, 3), (2, 1, 2)),
            SmallBasic(64, 256), nn.BatchNorm2d(256), nn.ReLU(), SmallBasic(256, 256), nn.BatchNorm2d(256), nn.ReLU(),
            nn.MaxPool3d((1, 3, 3), (4, 1, 2)), nn.Dropout(), nn.Conv2d(64, 256, (1, 4)), nn.BatchNorm2d(256),
            nn.ReLU(), nn.Dropout(), nn.Conv2d(256, characters, (13, 1)), nn.BatchNorm2d(characters), nn.ReLU(),
        )  # fmt: skip
        self.container = nn.Sequential(nn.Conv2d(448 + characters, characters, 1))

    def forward(self, x):
        kept = []
        for k, layer in enumerate(self.backbone):
            x = layer(x)
            if k in self.KEPT:
                kept.append(x)
        pools = ((5, 5), (5, 5), ((4, 10), (4, 2)), None)
        joined = []
        for value, pool in zip(kept, pools, strict=True):
            if pool is not None:
                value = F.avg_pool2d(value, *pool)
            joined.append(value / value.pow(2).mean())
        return self.container(torch.cat(joined, 1)).mean(2)


def convolved(inputs: int, outputs: int, side: int = 3, relu: bool = True, **options) -> nn.Sequential:
    """A convolution and its norm under the names that RFB's checkpoints use."""
    block = nn.Sequential()
    block.add_module("conv", nn.Conv2d(inputs, outputs, side, bias=False, **options))
    block.add_module("bn", nn.BatchNorm2d(outputs))
    if relu:
        block.add_module("relu", nn.ReLU())
    return block


class ReceptiveFields(nn.Module):
    """RFB (Liu et al., 2018): branches whose dilations differ, joined, beside a shortcut."""

    def __init__(self, channels: int = 64, narrow: int = 8):
        super().__init__()

        def branch(middle: tuple[int, ...], dilation: int) -> nn.Sequential:
            layers = [convolved(channels, narrow, 1, relu=False)]
            layers += [convolved(i, o, padding=1) for i, o in zip((narrow, *middle), middle, strict=False)]
            layers += [convolved(middle[-1], 16, padding=dilation, dilation=dilation, relu=False)]
            return nn.Sequential(*layers)

        self.branch0, self.branch1, self.branch2 = branch((16,), 2), branch((16,), 3), branch((12, 16), 5)
        self.ConvLinear = convolved(48, channels, 1, relu=False)
        self.shortcut = convolved(channels, channels, 1, relu=False)

    def forward(self, x):
        joined = torch.cat([self.branch0(x), self.branch1(x), self.branch2(x)], 1)
        return F.relu(self.ConvLinear(joined) + self.shortcut(x))


def apart(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution taken apart into depthwise and 1x1, without norms."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 1)
    )


class UltraLightFaces(nn.Module):
    """Linzaer's face detector, slim or with receptive fields: a MobileNet read at four strides.

    Returns the scores of 4420 boxes of a 320 x 240 picture and where they lie relative to their anchors.
    """

    STAGES = (8, 11, 13)  # layers after which the picture is read

    def __init__(self, fields: bool):
        super().__init__()
        widths = ((16, 32, 1), (32, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1), (64, 64, 1),
                  (64, 128, 2), (128, 128, 1), (128, 128, 1), (128, 256, 2), (256, 256, 1))  # fmt: skip
        layers: list[nn.Module] = [self.normed(3, 16, 3, 2)]
        for inputs, outputs, stride in widths:
            depthwise = self.normed(inputs, inputs, 3, stride, groups=inputs)
            layers.append(nn.Sequential(*depthwise, *self.normed(inputs, outputs, 1, 1)))
        if fields:
            layers[7] = ReceptiveFields()
        self.base_net = nn.Sequential(*layers)
        self.extras = nn.ModuleList([nn.Sequential(nn.Conv2d(256, 64, 1), nn.ReLU(), apart(64, 256, 2), nn.ReLU())])
        self.classification_headers, self.regression_headers = self.headers(2), self.headers(4)

    @staticmethod
    def normed(inputs: int, outputs: int, side: int, stride: int, **options) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False, **options)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    @staticmethod
    def headers(values: int) -> nn.ModuleList:
        last = nn.Conv2d(256, 3 * values, 3, padding=1)
        return nn.ModuleList([apart(64, 3 * values), apart(128, 2 * values), apart(256, 2 * values), last])

    def forward(self, x):
        read = []
        for k, layer in enumerate(self.base_net, start=1):
            x = layer(x)
            if k in self.STAGES:
                read.append(x)
        read.append(self.extras[0](x))
        scores = [self.flat(h(v), 2) for h, v in zip(self.classification_headers, read, strict=True)]
        places = [self.flat(h(v), 4) for h, v in zip(self.regression_headers, read, strict=True)]
        return torch.cat(scores, 1).softmax(2), torch.cat(places, 1)

    @staticmethod
    def flat(x: torch.Tensor, values: int) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, values)
