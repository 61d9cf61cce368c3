"""The command line: one small file per command, and one place where errors become exit statuses.

Exit status 0: done. 1: a check ran and failed. 2: the input was refused, nothing was written.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click
import typer
from typer.core import TyperGroup

from flashnorm.errors import CheckFailed, FlashnormError, Refusal
from flashnorm.version import __version__

# command name -> module in `flashnorm.cli` whose function `command` runs it. Imported only when asked for, so that
# `flashnorm --help` does not wait for torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "audit": ("audit", "List every norm, who reads it, and whether its gain can be folded."),
    "fold": ("fold", "Fold the norm gains of a checkpoint folder into the next weights."),
    "unfold": ("unfold", "Restore the gains of a folded checkpoint."),
    "verify": ("verify", "Prove that two checkpoints are the same model, or recheck a folder's hashes."),
    "import-gguf": ("import_gguf", "Dequantise a GGUF file to a Transformers checkpoint."),
    "lora": ("lora", "Translate a LoRA adapter for a folded base, or back."),
}


class LazyCommands(TyperGroup):
    """Lists the commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module_name, help_line = COMMANDS[name]
        module = importlib.import_module(f"flashnorm.cli.{module_name}")
        single = typer.Typer(add_completion=False)
        single.command(name=name, help=module.command.__doc__ or help_line)(module.command)
        return typer.main.get_command(single)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = typer.Typer(cls=LazyCommands, add_completion=False, no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    traceback: bool = typer.Option(False, "--traceback", help="Show the traceback of an error."),
) -> None:
    """Fold, verify and accelerate the norm-then-linear layers of any transformer checkpoint."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    ctx.obj = {"traceback": traceback}


def _fail(error: FlashnormError, status: int) -> int:
    if os.environ.get("FLASHNORM_TRACEBACK") or "--traceback" in sys.argv:
        import traceback

        traceback.print_exc()
    print(f"flashnorm: {error}", file=sys.stderr)
    return status


def main(argv: list[str] | None = None) -> Any:
    """Run the command line and exit with its status."""
    try:
        app(args=argv, prog_name="flashnorm")
    except CheckFailed as error:
        sys.exit(_fail(error, 1))
    except Refusal as error:
        sys.exit(_fail(error, 2))
    except FlashnormError as error:
        sys.exit(_fail(error, 2))


if __name__ == "__main__":
    main()
