"""Aspects for edits that name none: a taxonomy of edits, proposals by rules or by models, and a file for corrections."""

from tpips_reward.aspects.proposers import ModelProposer, ProposalError, Proposer, Request, RuleProposer, parse_proposer
from tpips_reward.aspects.rules import Proposal, propose
from tpips_reward.aspects.store import Entry, add_entries, aspects_mark, read_entries, write_entries
from tpips_reward.aspects.taxonomy import CATEGORIES, KINDS, Kind
from tpips_reward.aspects.validation import check_proposed

__all__ = [
    "CATEGORIES",
    "KINDS",
    "Entry",
    "Kind",
    "ModelProposer",
    "Proposal",
    "ProposalError",
    "Proposer",
    "Request",
    "RuleProposer",
    "add_entries",
    "aspects_mark",
    "check_proposed",
    "parse_proposer",
    "propose",
    "read_entries",
    "write_entries",
]
