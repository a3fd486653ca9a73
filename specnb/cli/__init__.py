"""The command line: a thin layer over the package, and the only part of it that prints."""

from specnb.cli.app import app as app
from specnb.cli.app import main as main
