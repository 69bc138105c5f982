if __name__ == "engines":
    from overlap_bench.old_names import give_way

    give_way(__name__)
