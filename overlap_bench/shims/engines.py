"""`engines` where overlap-bench is installed, for whoever imports `engines.api`."""

from overlap_bench.old_names import give_way

give_way(__name__)
