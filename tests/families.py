"""Dense blocks as other people write them: the single-file kinds that are widely copied, each in its own way.

Own code, of the same structure as what is named: what is a child and what a function, where the concatenation stands,
what is shared, in which order features come, what a block returns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

K = 4  # growth rate


class SharedReLU(nn.Module):
    """One ReLU called twice; dropout as a function behind either convolution (andreasveit/densenet-pytorch)."""

    def __init__(self, channels, droprate=0.0):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, 4 * K, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * K)
        self.conv2 = nn.Conv2d(4 * K, K, 3, padding=1, bias=False)
        self.droprate = droprate

    def forward(self, x):
        out = self.conv1(self.relu(self.bn1(x)))
        if self.droprate > 0:
            out = F.dropout(out, p=self.droprate, inplace=False, training=self.training)
        out = self.conv2(self.relu(self.bn2(out)))
        if self.droprate > 0:
            out = F.dropout(out, p=self.droprate, inplace=False, training=self.training)
        return torch.cat([x, out], 1)


class Basic(nn.Module):
    """BN-ReLU-conv3x3, dropout as a function (andreasveit's BasicBlock)."""

    def __init__(self, channels, droprate=0.0):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, K, 3, padding=1, bias=False)
        self.droprate = droprate

    def forward(self, x):
        out = self.conv1(self.relu(self.bn1(x)))
        if self.droprate > 0:
            out = F.dropout(out, p=self.droprate, training=self.training)
        return torch.cat([x, out], 1)


class Functional(nn.Module):
    """No ReLU among the children (bamos/densenet.pytorch)."""

    def __init__(self, channels):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * K, kernel_size=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * K)
        self.conv2 = nn.Conv2d(4 * K, K, kernel_size=3, padding=1, bias=False)

    def forward(self, x):
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat((x, out), 1)


class NewFirst(Functional):
    """New features before the old ones (kuangliu/pytorch-cifar)."""

    def forward(self, x):
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([out, x], 1)


class Unnamed(nn.Module):
    """A Sequential without names within (weiaicunzai/pytorch-cifar100)."""

    def __init__(self, channels):
        super().__init__()
        self.bottle_neck = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, 4 * K, 1, bias=False),
            nn.BatchNorm2d(4 * K), nn.ReLU(inplace=True), nn.Conv2d(4 * K, K, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x):
        return torch.cat([x, self.bottle_neck(x)], 1)


class OldStyle(nn.Sequential):
    """A Sequential that concatenates behind itself, in two or three dimensions (torchxrayvision, kenshohara)."""

    def __init__(self, channels, drop_rate=0.0, dims=2):
        super().__init__()
        norm, conv = (nn.BatchNorm2d, nn.Conv2d) if dims == 2 else (nn.BatchNorm3d, nn.Conv3d)
        self.add_module("norm1", norm(channels))
        self.add_module("relu1", nn.ReLU(inplace=True))
        self.add_module("conv1", conv(channels, 4 * K, kernel_size=1, stride=1, bias=False))
        self.add_module("norm2", norm(4 * K))
        self.add_module("relu2", nn.ReLU(inplace=True))
        self.add_module("conv2", conv(4 * K, K, kernel_size=3, stride=1, padding=1, bias=False))
        self.drop_rate = drop_rate

    def forward(self, x):
        new = super().forward(x)
        if self.drop_rate > 0:
            new = F.dropout(new, p=self.drop_rate, training=self.training)
        return torch.cat([x, new], 1)


class ManyArguments(nn.Module):
    """Features as separate arguments, and a checkpoint of its own (gpleiss/efficient_densenet_pytorch)."""

    def __init__(self, channels, efficient):
        super().__init__()
        self.add_module("norm1", nn.BatchNorm2d(channels))
        self.add_module("relu1", nn.ReLU(inplace=True))
        self.add_module("conv1", nn.Conv2d(channels, 4 * K, kernel_size=1, stride=1, bias=False))
        self.add_module("norm2", nn.BatchNorm2d(4 * K))
        self.add_module("relu2", nn.ReLU(inplace=True))
        self.add_module("conv2", nn.Conv2d(4 * K, K, kernel_size=3, stride=1, padding=1, bias=False))
        self.efficient = efficient

    def forward(self, *before):
        def bottleneck(*inputs):
            return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

        if self.efficient and any(features.requires_grad for features in before):
            out = torch.utils.checkpoint.checkpoint(bottleneck, *before, use_reentrant=True)
        else:
            out = bottleneck(*before)
        return self.conv2(self.relu2(self.norm2(out)))


class ManyArgumentsBlock(nn.Module):
    def __init__(self, channels, layers=3, efficient=False):
        super().__init__()
        for i in range(layers):
            self.add_module(f"denselayer{i + 1}", ManyArguments(channels + i * K, efficient))

    def forward(self, init_features):
        features = [init_features]
        for _, layer in self.named_children():
            features.append(layer(*features))
        return torch.cat(features, 1)


class ListLayer(nn.Module):
    """Takes a list only; one activation for both places (mmpretrain)."""

    def __init__(self, channels, act):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * K, 1, bias=False)
        self.act = act
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * K), nn.Conv2d(4 * K, K, 3, padding=1, bias=False)

    def forward(self, x):
        assert isinstance(x, list)
        out = self.conv1(self.act(self.norm1(torch.cat(x, 1))))
        return self.conv2(self.act(self.norm2(out)))


class ListBlock(nn.Module):
    def __init__(self, channels, layers=3):
        super().__init__()
        act = nn.ReLU()
        self.block = nn.ModuleList([ListLayer(channels + i * K, act) for i in range(layers)])

    def forward(self, init_features):
        features = [init_features]
        for layer in self.block:
            features.append(layer(features))
        return torch.cat(features, 1)


class ExtraArgument(nn.Module):
    """A second argument that is there for another time (wandering007/efficient-densenet-pytorch)."""

    def __init__(self, channels, layers=3):
        super().__init__()
        self.layers = layers
        for i in range(layers):
            self.add_module(f"layer{i}", Functional(channels + i * K))

    def forward(self, x, shared=None):
        if shared is not None:
            x = x + shared
        for i in range(self.layers):
            x = self._modules[f"layer{i}"](x)
        return x


class PreConv(nn.Module):
    """BN-ReLU-conv with switches (pytorchcv)."""

    def __init__(self, channels, out, kernel, activate=True):
        super().__init__()
        self.activate = activate
        self.bn = nn.BatchNorm2d(channels)
        self.activ = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)

    def forward(self, x):
        x = self.bn(x)
        if self.activate:
            x = self.activ(x)
        return self.conv(x)


class Switched(nn.Module):
    """Dropout is a module, where there is any (pytorchcv's DenseUnit)."""

    def __init__(self, channels, dropout_rate=0.0):
        super().__init__()
        self.use_dropout = dropout_rate != 0.0
        self.conv1, self.conv2 = PreConv(channels, 4 * K, 1), PreConv(4 * K, K, 3)
        if self.use_dropout:
            self.dropout = nn.Dropout(p=dropout_rate)

    def forward(self, x):
        identity = x
        x = self.conv2(self.conv1(x))
        if self.use_dropout:
            x = self.dropout(x)
        return torch.cat((identity, x), dim=1)


class SwitchedTransition(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.conv, self.pool = PreConv(channels, out, 1), nn.AvgPool2d(2, 2, 0)

    def forward(self, x):
        return self.pool(self.conv(x))


class TiramisuBlock(nn.Module):
    """Biases, channel-wise dropout; the way up returns new features only (bfortuner/pytorch_tiramisu)."""

    def __init__(self, channels, layers=3, upsample=False, dropout=0.2, bias=True):
        super().__init__()
        self.upsample = upsample
        self.layers = nn.ModuleList(self.layer(channels + i * K, dropout, bias) for i in range(layers))

    @staticmethod
    def layer(channels, dropout, bias):
        layer = nn.Sequential()
        layer.add_module("norm", nn.BatchNorm2d(channels))
        layer.add_module("relu", nn.ReLU(True))
        layer.add_module("conv", nn.Conv2d(channels, K, kernel_size=3, stride=1, padding=1, bias=bias))
        if dropout:
            layer.add_module("drop", nn.Dropout2d(dropout))
        return layer

    def forward(self, x):
        if self.upsample:
            new_features = []
            for layer in self.layers:
                out = layer(x)
                x = torch.cat([x, out], 1)
                new_features.append(out)
            return torch.cat(new_features, 1)
        for layer in self.layers:
            out = layer(x)
            x = torch.cat([x, out], 1)
        return x


class TiramisuLoop(nn.Module):
    """Norms, convolutions in lists of their own, called in turn; channel-wise dropout as a function; new ones first."""

    def __init__(self, channels, layers=3, upsample=False, dropout=0.2):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels + i * K) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(channels + i * K, K, 3, padding=1) for i in range(layers))
        self.upsample, self.dropout = upsample, dropout

    def forward(self, x):
        new = []
        for norm, conv in zip(self.norms, self.convs, strict=True):
            out = F.dropout2d(conv(torch.relu(norm(x))), self.dropout, self.training)
            x = torch.cat([out, x], 1)
            new.insert(0, out)
        return torch.cat(new, 1) if self.upsample else x


class BlockAndTransition(nn.Module):
    """A stage with the transition in its own forward; biases everywhere."""

    def __init__(self, channels, layers=3):
        super().__init__()
        self.layers = row(Unnamed, channels, layers)
        self.norm, self.conv = nn.BatchNorm2d(channels + layers * K), nn.Conv2d(channels + layers * K, channels, 1)

    def forward(self, x):
        return F.avg_pool2d(self.conv(self.norm(self.layers(x)).relu()), kernel_size=(2, 2), stride=2)


def row(kind, channels=8, layers=3, **kwargs):
    return nn.Sequential(*[kind(channels + i * K, **kwargs) for i in range(layers)])


class FunctionalTransition(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, out, 1, bias=False)

    def forward(self, x):
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class Net(nn.Module):
    """A model around two blocks of 8 channels and what they add, as single files have it."""

    def __init__(self, block, transition=FunctionalTransition, dims=2):
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.stem = conv(3, 8, 3, padding=1, bias=False)
        self.block1 = block(8)
        out = self.block1(torch.zeros(2, 8, *(4,) * dims)).shape[1]
        self.trans1 = transition(out, 8)
        self.block2 = block(8)
        self.fc = nn.Linear(out, 5)

    def forward(self, x):
        x = self.block2(self.trans1(self.block1(self.stem(x))))
        return self.fc(F.relu(x).flatten(2).mean(2))


def standard_transition(channels, out, dims=2):
    norm, conv, pool = getattr(nn, f"BatchNorm{dims}d"), getattr(nn, f"Conv{dims}d"), getattr(nn, f"AvgPool{dims}d")
    return nn.Sequential(norm(channels), nn.ReLU(inplace=True), conv(channels, out, 1, bias=False), pool(2, 2))


def voxel_transition(channels, out):
    return standard_transition(channels, out, 3)


FAMILIES = {
    "andreasveit": lambda: Net(lambda c: row(SharedReLU, c)),
    "andreasveit, basic": lambda: Net(lambda c: row(Basic, c, droprate=0.2)),
    "bamos": lambda: Net(lambda c: row(Functional, c)),
    "weiaicunzai": lambda: Net(lambda c: row(Unnamed, c), standard_transition),
    "torchxrayvision": lambda: Net(lambda c: row(OldStyle, c, drop_rate=0.2), standard_transition),
    "kenshohara": lambda: Net(lambda c: row(OldStyle, c, dims=3), voxel_transition, 3),
    "gpleiss": lambda: Net(ManyArgumentsBlock, standard_transition),
    "gpleiss, efficient": lambda: Net(lambda c: ManyArgumentsBlock(c, efficient=True), standard_transition),
    "mmpretrain": lambda: Net(ListBlock, standard_transition),
    "wandering007": lambda: Net(ExtraArgument),
    "pytorchcv": lambda: Net(lambda c: row(Switched, c, dropout_rate=0.2), SwitchedTransition),
    "kuangliu": lambda: Net(lambda c: row(NewFirst, c)),
    "tiramisu": lambda: Net(TiramisuBlock, standard_transition),
    "tiramisu, up": lambda: Net(lambda c: TiramisuBlock(c, upsample=True, dropout=0.0), standard_transition),
    "tiramisu, dropout as a function": lambda: Net(lambda c: TiramisuLoop(c, upsample=True), standard_transition),
    "in one module": lambda: Net(BlockAndTransition),
}
