"""Networks of published checkpoints that come without their code, written from the papers and the keys in the files.

ResNets for CIFAR-10 (He et al., 2015, section 4.2, option A: shortcuts without parameters) and LPRNet (Zherzdev and
Gruzdev, 2018), which pools over channels as well as over space.
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
