"""The measured items, one a file, each with its cells for a mode. A cell is one comparison under one set of conditions."""

from suite.items import incrementation, overheads, programs, tasks, terrain
from suite.items.cell import Cell, Item, collected

ITEMS: dict[str, Item] = {item.name: item for item in (incrementation.ITEM, tasks.ITEM, terrain.ITEM, overheads.ITEM, *programs.ITEMS)}

__all__ = ["ITEMS", "Cell", "Item", "collected"]
