"""How every command reads its line: an option that takes one value is given once."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command that refuses an option given twice, where the last would silently win."""

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        read = parser.parse_args

        def read_once(args: list[str]) -> Any:
            if ctx.resilient_parsing and args and args[-1].startswith("-"):
                # At TAB after an option its value is not there yet; without it nothing would be read.
                args = args[:-1]
            try:
                values, rest, order = read(args=args)
            except Exception as error:
                # A parser that fails forgets whose line it was; the hint names that command.
                if getattr(error, "ctx", ctx) is None:
                    error.ctx = ctx  # type: ignore[attr-defined]
                raise
            _refuse_repeated(order, ctx)
            return values, rest, order

        parser.parse_args = read_once
        return parser


def _refuse_repeated(order: list[Any], ctx: Any) -> None:
    seen: list[Any] = []
    for option in order:
        # A flag that is given twice still says the same.
        takes_one = bool(getattr(option, "opts", None)) and not getattr(option, "is_flag", False)
        if takes_one and option.param_type_name == "option" and not option.multiple:
            if option in seen and not ctx.resilient_parsing:
                raise typer.BadParameter(f"{option.opts[0]} is given twice; say it once", ctx=ctx)
            seen.append(option)
