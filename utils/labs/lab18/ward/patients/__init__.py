"""The programs of the thirty patients, each of them sick in one line."""
