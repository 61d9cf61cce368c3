"""The command line: one small file per command, and one place where errors become exit statuses.

Exit status 0: done. 1: a check ran and failed. 2: the input was refused, nothing was written. 70: a bug, with its
traceback; never 1, which a script takes for a verdict. 130: interrupted. 141: the reader of the output
went away, as for any program that a closed pipe ends.
Command modules import torch and the rooms below inside their function, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from typing import Any

import typer

from flashnorm.cli import audit, bench, cancel, center, fold, generate, import_gguf, lora, tune, unfold, verify
from flashnorm.errors import CheckFailed, FlashnormError
from flashnorm.version import __version__

CHECK_FAILED, REFUSED, BUG = 1, 2, 70  # 70: EX_SOFTWARE of sysexits.h
PIPE_CLOSED = 128 + 13  # what a shell reports of a program that SIGPIPE ended
_FULL = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fold, verify and accelerate the norm-then-linear layers of any transformer checkpoint.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    pass


app.command("audit")(audit.command)
app.command("cancel")(cancel.command)
app.command("center")(center.command)
app.command("fold")(fold.command)
app.command("generate")(generate.command)
app.command("import-gguf")(import_gguf.command)
app.command("lora")(lora.command)
app.add_typer(bench.app, name="bench")
app.command("tune")(tune.command)
app.command("unfold")(unfold.command)
app.command("verify")(verify.command)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line and exit with its status. `FLASHNORM_TRACEBACK=1` shows where an error came from."""
    # Importing torch and Transformers makes a million objects that stay; at the default threshold, searching them for
    # garbage over and over takes a tenth of the start-up.
    gc.set_threshold(100_000)
    try:
        app(args=argv, prog_name="flashnorm")
    except FlashnormError as error:
        if os.environ.get("FLASHNORM_TRACEBACK"):
            traceback.print_exc()
        print(f"flashnorm: {error}", file=sys.stderr)
        sys.exit(CHECK_FAILED if isinstance(error, CheckFailed) else REFUSED)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # click ends with 1 then, which is a failed check's
            sys.exit(PIPE_CLOSED)
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            print(f"flashnorm: the output cannot be written: {error.strerror}", file=sys.stderr)
            sys.exit(REFUSED)
        traceback.print_exc()
        print(
            "flashnorm: this error was not foreseen, so it is a bug, and says nothing about the model; report it with "
            "the lines above and the command that you gave",
            file=sys.stderr,
        )
        sys.exit(BUG)


if __name__ == "__main__":
    main()
