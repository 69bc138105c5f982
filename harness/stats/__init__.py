"""Paired blocks to an effect, its interval and a verdict; when a run may stop. The method: stats.md."""
