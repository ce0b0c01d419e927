"""The ward of lab 18: thirty patients, of which a student gets twelve."""
