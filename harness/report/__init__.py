"""A result for people: tables, pages, one HTML file, figures."""
