"""The commands. Each parses, calls the library, renders the report and returns a documented exit code.

Everything heavy is imported inside the commands: `bnfold --help` imports neither torch nor onnx.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bnfold.recognition import Reading
    from bnfold.report import Report

    from .render import Screen

app = typer.Typer(
    name="bnfold",
    rich_markup_mode=None,  # plain help takes 0.15 s, with rich it is 0.3 s
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fold batch normalization out of trained networks, verified, with a reason for every norm that stays.",
    epilog="Exit codes: 0 done; 1 internal error; 2 wrong usage; 3 not equivalent; 4 normalizations remain "
    "(--require-all); 5 statistics drifted; 6 a file is missing, invalid or unsafe, or cannot be written.",
)

# readable=False: typer does not look whether files can be read; our readers do, and exit with 6
Source = Annotated[
    Path,
    typer.Argument(metavar="FILE", readable=False, help="A checkpoint (.pt, .pth, .safetensors, .pt2) or .onnx."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", readable=False, help="Where to write.")]
Factory = Annotated[
    str | None,
    typer.Option("--factory", metavar="MODULE:CALLABLE", help="Builds the network a state dict belongs to."),
]
FactoryArg = Annotated[
    list[str] | None,
    typer.Option("--factory-arg", metavar="KEY=VALUE", help="Keyword for the factory (repeatable)."),
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Allow the file to run code while loading. Only for files you trust.")
]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="A.B", help="Where in the checkpoint the weights are, if in several places."),
]
Ema = Annotated[bool, typer.Option("--ema", help="Take the averaged weights (EMA) instead of the raw ones.")]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Accept keys that are missing, or that the network does not know.")
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input", "-i", metavar="SHAPE", help="1x3x224x224, name=1x3xHxW or ids=1x16:int64:0..999 (repeatable)."
    ),
]
InputFile = Annotated[
    Path | None,
    typer.Option("--input-file", metavar="PATH", readable=False, help="Real inputs: one batch, .npz or .npy."),
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="PATTERN", help="Fold only norms whose name matches (repeatable).")
]
Skip = Annotated[
    list[str] | None, typer.Option("--skip", metavar="PATTERN", help="Keep norms whose name matches (repeatable).")
]
NoMerge = Annotated[bool, typer.Option("--no-merge", help="Leave parallel branches as separate layers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
RequireAll = Annotated[bool, typer.Option("--require-all", help="Exit 4, and write nothing, when a norm remains.")]
KeepBroken = Annotated[
    bool, typer.Option("--keep-broken", help="Keep norms with NaN or infinite statistics instead of exiting 6.")
]
Freeze = Annotated[
    bool, typer.Option("--freeze-initializers", help="ONNX: initializers that are also inputs are constants.")
]
Respect = Annotated[bool, typer.Option("--respect-inputs", help="ONNX: never take a listed initializer as a constant.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]
InPlace = Annotated[
    bool, typer.Option("--in-place", help="Allow the output to be the input (fold: without -o, it is).")
]
Tolerance = Annotated[
    float | None, typer.Option("--tolerance", metavar="X", help="Allowed error, relative to each output's range.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Write without checking against the source.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bnfold {version('bnfold')}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; its text is the app's `help`."""


@app.command()
def export(
    file: Source,
    output: Output = None,
    input: Input = None,
    input_file: InputFile = None,
    factory: Factory = None,
    factory_arg: FactoryArg = None,
    trust_pickle: TrustPickle = False,
    key: Key = None,
    ema: Ema = False,
    allow_missing: AllowMissing = False,
    only: Only = None,
    skip: Skip = None,
    no_merge: NoMerge = False,
    require_all: RequireAll = False,
    keep_broken: KeepBroken = False,
    freeze_initializers: Freeze = False,
    respect_inputs: Respect = False,
    static: Annotated[bool, typer.Option("--static", help="Pin all dimensions; else the batch stays free.")] = False,
    opset: Annotated[int | None, typer.Option("--opset", metavar="N", help="ONNX opset of the file.")] = None,
    input_name: Annotated[
        list[str] | None, typer.Option("--input-name", metavar="NAME", help="Name of an input, in order (repeatable).")
    ] = None,
    output_name: Annotated[
        list[str] | None,
        typer.Option("--output-name", metavar="NAME", help="Name of an output, in order (repeatable)."),
    ] = None,
    tolerance: Tolerance = None,
    no_verify: NoVerify = False,
    force: Force = False,
    in_place: InPlace = False,
    json: Json = False,
) -> None:
    """Turn a checkpoint into a folded ONNX file, checked against it."""
    from .render import Screen

    with Screen(json) as screen:
        from bnfold.exporter import export as run_export

        _warn_of(trust_pickle, screen, file)
        result = run_export(
            file,
            output,
            example_inputs=_example_inputs(input, input_file),
            verify=not no_verify,
            factory=factory,
            factory_args=_factory_args(factory_arg),
            trust_pickle=trust_pickle,
            key=key,
            ema=ema,
            allow_missing=allow_missing,
            only=only,
            skip=skip,
            merge=not no_merge,
            freeze_initializers=freeze_initializers,
            respect_inputs=respect_inputs,
            keep_broken=keep_broken,
            require_all=require_all,
            static=static,
            opset=opset,
            input_names=input_name,
            output_names=output_name,
            tolerance=tolerance,
            force=force,
            in_place=in_place,
            progress=screen.step,
        )
        screen.show(result.report)


@app.command()
def fold(
    file: Source,
    output: Output = None,
    input: Input = None,
    input_file: InputFile = None,
    factory: Factory = None,
    factory_arg: FactoryArg = None,
    trust_pickle: TrustPickle = False,
    key: Key = None,
    ema: Ema = False,
    allow_missing: AllowMissing = False,
    only: Only = None,
    skip: Skip = None,
    no_merge: NoMerge = False,
    require_all: RequireAll = False,
    keep_broken: KeepBroken = False,
    freeze_initializers: Freeze = False,
    respect_inputs: Respect = False,
    tolerance: Tolerance = None,
    no_verify: NoVerify = False,
    force: Force = False,
    in_place: InPlace = False,
    json: Json = False,
) -> None:
    """Fold a model and keep its kind: .onnx, .pt2, checkpoint. Without -o, a.pt becomes a.folded.pt beside it."""
    from .render import Screen

    with Screen(json) as screen:
        from bnfold.refolding import fold_file

        _warn_of(trust_pickle, screen, file)
        report = fold_file(
            file,
            output,
            verify=not no_verify,
            only=only,
            skip=skip,
            merge=not no_merge,
            freeze_initializers=freeze_initializers,
            respect_inputs=respect_inputs,
            keep_broken=keep_broken,
            require_all=require_all,
            reading=_reading(factory, factory_arg, trust_pickle, key, ema, allow_missing),
            example_inputs=_example_inputs(input, input_file),
            tolerance=tolerance,
            force=force,
            in_place=in_place,
            progress=screen.step,
        )
        screen.show(report)


@app.command()
def inspect(
    file: Source,
    input: Input = None,
    input_file: InputFile = None,
    factory: Factory = None,
    factory_arg: FactoryArg = None,
    trust_pickle: TrustPickle = False,
    key: Key = None,
    ema: Ema = False,
    allow_missing: AllowMissing = False,
    only: Only = None,
    skip: Skip = None,
    no_merge: NoMerge = False,
    freeze_initializers: Freeze = False,
    respect_inputs: Respect = False,
    json: Json = False,
) -> None:
    """Show what folding would do, and why a norm would stay. Changes nothing."""
    from .render import Screen

    with Screen(json) as screen:
        from bnfold.recognition import recognise
        from bnfold.transform import plan

        _warn_of(trust_pickle, screen, file)
        reading = _reading(factory, factory_arg, trust_pickle, key, ema, allow_missing)
        specs = _example_inputs(input, input_file)
        screen.step(f"loading {file.name}")
        kind = recognise(file)
        if kind in ("torch", "safetensors", "sharded") and factory is None and not trust_pickle:
            screen.show(_looked_into(file, kind))
            return
        model, inputs, notes = file, None, ()
        if kind != "onnx" or factory is not None:
            model, inputs, notes = _loaded(file, reading, specs)
        screen.step("planning")
        report = plan(
            model,
            inputs,
            only=only,
            skip=skip,
            merge=not no_merge,
            freeze_initializers=freeze_initializers,
            respect_inputs=respect_inputs,
        )
        screen.show(report.with_(notes=(*notes, *report.notes)), planned=True)


@app.command()
def verify(
    reference: Annotated[
        Path, typer.Argument(metavar="REFERENCE", readable=False, help="What is right: a checkpoint or .onnx.")
    ],
    candidate: Annotated[
        Path, typer.Argument(metavar="CANDIDATE", readable=False, help="What is judged: an .onnx or a checkpoint.")
    ],
    input: Input = None,
    input_file: InputFile = None,
    factory: Factory = None,
    factory_arg: FactoryArg = None,
    trust_pickle: TrustPickle = False,
    key: Key = None,
    ema: Ema = False,
    allow_missing: AllowMissing = False,
    provider: Annotated[
        list[str] | None, typer.Option("--provider", metavar="NAME", help="cpu, cuda, … (repeatable; default cpu).")
    ] = None,
    tolerance: Tolerance = None,
    json: Json = False,
) -> None:
    """Compare two models on seeded inputs. Exit 3 when an output differs, relative to its range."""
    from .render import Screen

    with Screen(json) as screen:
        from bnfold.errors import NotEquivalentError
        from bnfold.exporter import verify_models
        from bnfold.inputs import trials_on
        from bnfold.report import Report

        _warn_of(trust_pickle, screen, reference, candidate)
        given = _example_inputs(input, input_file)
        reading = _reading(factory, factory_arg, trust_pickle, key, ema, allow_missing)
        models = [_runnable(path, reading, screen.step) for path in (reference, candidate)]
        screen.step("verifying")
        trials = trials_on(given, models[0])
        verdict = verify_models(*models, trials=trials, providers=_providers(provider), tolerance=tolerance)
        report = Report(verdict=verdict)
        if not verdict.passed:
            raise NotEquivalentError(f"{candidate} does not compute what {reference} computes", report)
        screen.show(report)


@app.command()
def explain(
    reason: Annotated[str | None, typer.Argument(metavar="REASON", help="A reason; all of them when left out.")] = None,
    json: Json = False,
) -> None:
    """Say what a reason means and what would change it."""
    from .render import Screen

    with Screen(json) as screen:
        from bnfold.errors import UsageError
        from bnfold.report import REASONS, Reason

        if reason is not None and reason not in list(Reason):
            import difflib

            near = " or ".join(difflib.get_close_matches(reason, list(Reason), 3))
            raise UsageError(
                f"there is no reason {reason!r}: {(near and f'did you mean {near}?') or 'see `bnfold explain`'}"
            )
        screen.reasons({r: d for r, d in REASONS.items() if reason in (None, r)})


# ---------------------------------------------------------------------- arguments


def _factory_args(items: list[str] | None) -> dict[str, Any]:
    if not items:
        return {}
    from bnfold.factories import parse_factory_args

    return parse_factory_args(items)


def _example_inputs(texts: list[str] | None, file: Path | None) -> Any:
    """Input specs or arrays; tensors are made from them once the model is known."""
    if not texts and file is None:
        return None
    from bnfold.errors import UsageError
    from bnfold.inputs import parse_inputs, read_arrays

    if file is None:
        return parse_inputs(texts or ())
    if texts:
        raise UsageError("--input and --input-file say the same in two ways: pass one of them")
    return read_arrays(file)


def _providers(names: list[str] | None) -> tuple[str, ...]:
    short = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
    return tuple(short.get(n.lower(), n) for n in names) if names else ("CPUExecutionProvider",)


def _warn_of(trust_pickle: bool, screen: Screen, *files: Path) -> None:
    if trust_pickle:
        names = " and ".join(str(f) for f in files)
        screen.warn(f"--trust-pickle lets {names} run code while it is read")


def _reading(
    factory: str | None, factory_arg: list[str] | None, trust_pickle: bool, key: str | None, ema: bool, missing: bool
) -> Reading:
    from bnfold.recognition import Reading

    return Reading(factory, _factory_args(factory_arg), trust_pickle, key, ema, missing)


def _looked_into(path: Path, kind: str) -> Report:
    """What a checkpoint holds, without torch: keys, shapes and the norms that they show."""
    from bnfold.contents import as_plain, read_contents
    from bnfold.report import FileInfo, Norm, Report

    contents = as_plain(read_contents(path, kind))
    norms = [Norm(n["norm"], "running statistics", n["channels"]) for s in contents["sets"][:1] for n in s["norms"]]
    modules = any(s["kind"] != "state dict" for s in contents["sets"])
    note = "--trust-pickle" if modules else "--factory package.module:callable"
    return Report(
        norms=tuple(norms),
        files=(FileInfo("source", str(path), path.stat().st_size),),
        notes=(f"pass {note} to see what folding would do",),
        contents=contents,
    )


def _loaded(path: Path, reading: Reading, specs: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """A model to plan for, example inputs where it needs them, and notes. A script counts as the ONNX it becomes."""
    from bnfold.checkpoint import load_detailed
    from bnfold.inputs import inputs_for
    from bnfold.scripts import write_script

    loaded = load_detailed(path, reading)
    model, notes = loaded.model, loaded.notes
    if loaded.kind in ("state-dict", "torchscript"):
        model.eval()
    if loaded.kind not in ("state-dict", "module", "torchscript"):
        return model, None, notes
    given = inputs_for(model, specs, loaded.shapes)
    if loaded.kind == "torchscript":
        return write_script(model, given.inputs, free=given.free), None, (*notes, *given.notes)
    return model, given.inputs, (*notes, *given.notes)


def _runnable(path: Path, reading: Reading, step: Callable[[str], None]) -> Any:
    """An .onnx stays a path, so that onnxruntime reads it; anything else is loaded."""
    from bnfold.checkpoint import load_detailed
    from bnfold.onnx_files import open_onnx
    from bnfold.recognition import Reading, recognise

    step(f"loading {path.name}")
    onnx = path.suffix.lower() == ".onnx"
    if onnx and recognise(path) == "onnx":
        open_onnx(path)
        return path
    loaded = load_detailed(path, Reading(trust_pickle=reading.trust_pickle) if onnx else reading)
    if loaded.kind == "torchscript":
        loaded.model.eval()
    return path if loaded.kind == "onnx" else loaded.model


# ---------------------------------------------------------------------- the process


class Exit(IntEnum):
    """Exit codes that no error of bnfold carries."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


def run(argv: list[str] | None = None) -> None:
    """Run the program and exit with a documented code."""
    from bnfold.errors import BnfoldError

    arguments = sys.argv[1:] if argv is None else argv
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    code: int = Exit.DONE if arguments else Exit.USAGE
    try:
        if app(args=arguments or ["--help"], prog_name="bnfold", standalone_mode=False) == Exit.INTERRUPTED:
            raise KeyboardInterrupt  # typer turns it into its own Exit
    except BnfoldError as e:
        code = _fail(str(e), e.exit_code, arguments, e.report)
    except KeyboardInterrupt:
        code = _fail("interrupted", Exit.INTERRUPTED, arguments)
    except _TerminatedError:
        raise
    except SystemExit:
        code = _fail(
            "code of the network, or of its file, ended the program (sys.exit); mend it", Exit.USAGE, arguments
        )
    except Exception as e:
        if (wrong_usage := getattr(e, "format_message", None)) is not None:  # click's, or of the copy inside typer
            said = str(wrong_usage())
            code = _fail(f"{said.rstrip('.')} ({_hint(arguments, said, e)})", Exit.USAGE, arguments)
        elif os.environ.get("BNFOLD_DEBUG"):
            raise
        else:
            first = next(iter(str(e).strip().splitlines()), "")
            text = f"internal error: {type(e).__name__}: {first} (BNFOLD_DEBUG=1 shows where)"
            code = _fail(text, Exit.INTERNAL, arguments)
    sys.exit(code)


def _hint(arguments: list[str], said: str, wrong_usage: Exception) -> str:
    """What to type instead, where that can be told."""
    context: Any = getattr(wrong_usage, "ctx", None)
    if "No such command" in said and Path(arguments[0]).suffix:
        return f"for a model: bnfold export {arguments[0]}"
    known = {name for parameter in (context.command.params if context else ()) for name in parameter.opts}
    if long := next((f"-{a}" for a in arguments if f"-{a}" in known), None):
        return f"did you mean {long}?"
    if "extra argument" in said and arguments[0] in ("export", "fold"):
        return "one model at a time; -o names the output"
    return "-h lists what there is"


class _TerminatedError(SystemExit):
    """A signal ended the program, not code of a network."""


def _terminate(number: int, frame: object) -> None:
    """Leave through the `finally` blocks, which remove what is half written."""
    raise _TerminatedError(128 + number)


def _fail(message: str, code: int, arguments: list[str], report: Report | None = None) -> int:
    from .render import show_error

    show_error(" ".join(message.split()), code, "--json" in arguments, report)
    return code
