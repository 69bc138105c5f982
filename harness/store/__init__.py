"""The results folder: manifest.json, blocks/000/*.parquet, summary.json."""
