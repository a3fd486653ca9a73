"""Drafters, and translation between two vocabularies.

This package depends on no acceptance rule and no cost. `specnb.registry` finds drafters by name.
"""
