"""Which process says what: the main one everything, each other one its errors and what it alone has met."""

from __future__ import annotations

import logging

#: Warnings that no other process would give: of a reward that is asked again, of a photograph that does not decode.
each_process = logging.getLogger("rl_recipes.logs.each_process")


def quieten() -> None:
    """Leaves to a process that is not the main one its errors and `each_process`."""
    logging.getLogger("rl_recipes").setLevel(logging.ERROR)
    each_process.setLevel(logging.WARNING)
