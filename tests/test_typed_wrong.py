"""Commands typed wrong in the usual ways: each is answered by one line, and what that line says to type works."""

from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
import torch
from checkpoints import WEIGHTS, net
from command import bnfold, contents, one_line

from bnfold import export

FACTORY = "--factory typed_net:Net"
RIGHT = f"export model.pt {FACTORY} -o out.onnx"
SIZED = f"{RIGHT} --input 1x3x8x8"
NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return self.bn(self.conv(x))

def leave():
    raise SystemExit(3)

class Leaving(Net):
    def forward(self, x):
        raise SystemExit(0)
"""


class Typed(NamedTuple):
    wrong: str
    says: str  # fragments of the answer, between `…`
    right: str
    code: int = 2


LINES = {
    "verb-forgotten": Typed(
        "net.onnx", "No such command 'net.onnx' … bnfold export net.onnx", "export net.onnx -o out.onnx"
    ),
    "verb-misspelt": Typed("exprot model.pt", "'export'", RIGHT),
    "file-misspelt": Typed(
        f"export modle.pt {FACTORY}", "modle.pt: no such file … did you mean model.pt?",
        RIGHT, 6,
    ),
    "file-of-another-folder": Typed(
        "inspect models/model.pt", "models/model.pt: no such file (looked from … check the path", "inspect model.pt", 6
    ),
    "suffix-misremembered": Typed("inspect model.pth", "did you mean model.pt?", "inspect model.pt", 6),
    "folder": Typed("export .", "is a folder; name the file in it", "export net.onnx -o out.onnx", 6),
    "factory-forgotten": Typed(
        "export model.pt -o out.onnx", "model.pt: holds weights only … --factory package.module:callable",
        RIGHT,
    ),
    "factory-forgotten-by-fold": Typed("fold model.pt", "holds weights only … --factory", f"fold model.pt {FACTORY}"),
    "factory-forgotten-by-verify": Typed(
        "verify model.pt net.onnx", "model.pt: holds weights only … --factory", f"verify model.pt net.onnx {FACTORY}"
    ),
    "factory-without-module": Typed(
        "export model.pt --factory Net", "'Net' has no module … package.module:callable",
        RIGHT,
    ),
    "factory-with-a-dot": Typed(
        "export model.pt --factory typed_net.Net", "did you mean typed_net:Net?", RIGHT
    ),
    "factory-that-is-a-file": Typed(
        "export model.pt --factory typed_net.py", "name what to call in it, typed_net.py:Net",
        "export model.pt --factory typed_net.py:Net -o out.onnx",
    ),
    "factory-misspelt": Typed(
        "export model.pt --factory typed_net:net", "typed_net has no 'net'; did you mean Net?",
        RIGHT,
    ),
    "factory-argument-without-equals": Typed(
        f"export model.pt {FACTORY} --factory-arg channels", "'channels' … key=value",
        f"export model.pt {FACTORY} --factory-arg channels=4 -o out.onnx",
    ),
    "factory-argument-unknown": Typed(
        f"export model.pt {FACTORY} --factory-arg width=4", "width … --factory-arg",
        f"export model.pt {FACTORY} --factory-arg channels=4 -o out.onnx",
    ),
    "factory-argument-of-another-size": Typed(
        f"export model.pt {FACTORY} --factory-arg channels=8", "shapes differ … pass the factory and arguments it was",
        f"export model.pt {FACTORY} --factory-arg channels=4 -o out.onnx", 6,
    ),
    "size-without-batch": Typed(
        f"export model.pt {FACTORY} --input 3x8x8", "does not run on inputs of shape (3, 8, 8)",
        SIZED,
    ),
    "size-with-channels-last": Typed(
        f"export model.pt {FACTORY} --input 1x8x8x3", "does not run on inputs of shape (1, 8, 8, 3) … 3 channels",
        SIZED,
    ),
    "size-with-commas": Typed(
        f"export model.pt {FACTORY} --input 1,3,8,8", "--input 1,3,8,8: expected sizes such as 1x3x224x224",
        SIZED,
    ),
    "key-misspelt": Typed(
        f"export two.pt {FACTORY} --key modle", "no weights under the key 'modle'; did you mean 'model'?",
        f"export two.pt {FACTORY} --key model -o out.onnx", 6,
    ),
    "factory-for-onnx": Typed(
        f"export net.onnx {FACTORY} -o out.onnx", "a whole model (onnx); leave out --factory",
        "export net.onnx -o out.onnx",
    ),
    "opset-for-onnx": Typed(
        "export net.onnx --opset 18 -o out.onnx", "an ONNX file already", "export net.onnx -o out.onnx"
    ),
    "fold-to-onnx": Typed(
        f"fold model.pt {FACTORY} -o out.onnx", "`bnfold export`", RIGHT
    ),
    "trust-forgotten": Typed(
        "export pickled.pt -o out.onnx", "checkpoints.Net … --trust-pickle if you trust it",
        "export pickled.pt --trust-pickle -o out.onnx", 6,
    ),
    "output-as-a-second-name": Typed(
        f"export model.pt out.onnx {FACTORY}", "(out.onnx) … -o names the output", RIGHT
    ),
    "one-dash": Typed(
        f"export model.pt {FACTORY} -input 1x3x8x8", "did you mean --input?", SIZED
    ),
    "output-in-one-word": Typed(
        f"export model.pt out.onnx {FACTORY} -omodel", "(out.onnx) … -o names the output", RIGHT
    ),
    "size-of-another-world": Typed(
        f"export model.pt {FACTORY} --input 99999999999999999999x3x8x8", "--input 99999999999999999999x3x8x8: torch",
        SIZED,
    ),
    "size-beyond-memory": Typed(
        f"export model.pt {FACTORY} --input 9999999999x3x99999x99999", "--input 9999999999x3x99999x99999: torch", SIZED
    ),
    "type-that-cannot-be-drawn": Typed(
        f"export model.pt {FACTORY} --input 1x3x8x8:qint8", "--input 1x3x8x8: torch cannot make it", SIZED
    ),
    "name-without-text": Typed(f"{RIGHT} --output-name ''", "--output-name '': no name", f"{RIGHT} --output-name y"),
    "name-of-the-input": Typed(
        f"{RIGHT} --output-name x", "--output-name x: something else", f"{RIGHT} --output-name y"
    ),
    "name-twice": Typed(
        f"{RIGHT} --input-name a --output-name a", "--output-name a: something else", f"{RIGHT} --input-name a"
    ),
    "factory-that-exits": Typed("export model.pt --factory typed_net:leave", "leave failed (SystemExit: 3)", RIGHT),
    "network-that-exits": Typed(
        "export model.pt --factory typed_net:Leaving --input 1x3x8x8", "ended the program (sys.exit)", SIZED
    ),
    "factory-with-a-colon-too-many": Typed(
        "export model.pt --factory typed_net:", "write package.module:callable or net.py:Net", RIGHT
    ),
    "factory-that-is-a-path": Typed(
        "export model.pt --factory ../typed_net", "write package.module:callable or net.py:Net", RIGHT
    ),
    "broken-link": Typed("inspect link.pt", "link.pt: no such file … a link to gone.pt, which is not there", RIGHT, 6),
    "tolerance-below-zero": Typed(f"{RIGHT} --tolerance -1", "--tolerance -1.0", f"{RIGHT} --tolerance 0.1"),
    "option-misspelt": Typed(
        f"export model.pt {FACTORY} --inputs 1x3x8x8", "--input", SIZED
    ),
    "output-there": Typed(
        f"export model.pt {FACTORY} -o net.onnx", "net.onnx exists … --force",
        f"export model.pt {FACTORY} -o net.onnx --force",
    ),
    "one-model-to-verify": Typed("verify net.onnx", "CANDIDATE", "verify net.onnx net.onnx"),
    "reason-misspelt": Typed("explain padded-shfit", "did you mean padded-shift?", "explain padded-shift"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typed_net.py").write_text(NETWORK)
    Path("link.pt").symlink_to("gone.pt")
    torch.save(WEIGHTS, "model.pt")
    torch.save({"model": WEIGHTS, "teacher": WEIGHTS}, "two.pt")
    torch.save(net(), "pickled.pt")
    export(net(), "net.onnx", example_inputs=torch.randn(1, 3, 8, 8))
    return tmp_path


@pytest.mark.parametrize("name", LINES)
def test_one_line_leads_to_the_right_command(name, folder):
    typed, before = LINES[name], contents(folder)
    done = bnfold(typed.wrong)
    assert (done.code, done.out) == (typed.code, "")
    message = one_line(done)
    for fragment in typed.says.split(" … "):
        assert fragment in message
    assert contents(folder) == before
    right = bnfold(typed.right)
    assert right.code == 0, right.err
    if "out.onnx" in typed.right:
        onnx.checker.check_model(onnx.load("out.onnx"))
