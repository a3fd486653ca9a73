"""Drafters, and translation between two vocabularies.

This package does not depend on acceptance rules or costs. `specnb.registry` finds drafters by name.
"""
