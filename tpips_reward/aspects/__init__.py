"""Aspects for edits that name none: a taxonomy of edits, rules from instructions, and a file for corrections."""

from tpips_reward.aspects.rules import Proposal, propose
from tpips_reward.aspects.store import Entry, read_entries, write_entries
from tpips_reward.aspects.taxonomy import CATEGORIES, KINDS, Kind
from tpips_reward.aspects.validation import check_proposed

__all__ = [
    "CATEGORIES",
    "KINDS",
    "Entry",
    "Kind",
    "Proposal",
    "check_proposed",
    "propose",
    "read_entries",
    "write_entries",
]
