"""The command line: a thin shell over the package, and the only room that prints."""

from specnb.cli.app import app as app
from specnb.cli.app import main as main
