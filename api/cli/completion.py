"""`roundtable completion`: the shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from roundtable.cli.shared.output import say_lines

_WHERE = {
    "bash": "roundtable completion bash > ~/.local/share/bash-completion/completions/roundtable",
    "zsh": "roundtable completion zsh > a folder of $fpath, as _roundtable",
    "fish": "roundtable completion fish > ~/.config/fish/completions/roundtable.fish",
}


@click.command(epilog="Install: " + "; ".join(f"{text}" for text in _WHERE.values()))
@click.argument("shell", type=click.Choice(sorted(_WHERE)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    completer = get_completion_class(shell)
    if completer is None:
        raise click.ClickException(f"this version of click has no completion for {shell}; upgrade click")
    script = completer(context.find_root().command, {}, "roundtable", "_ROUNDTABLE_COMPLETE")
    say_lines(script.source())
