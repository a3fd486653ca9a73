"""Who proposes: drafters, and translation between two vocabularies.

It knows no rule of acceptance and no cost. Others are found by `specnb.registry`.
"""
