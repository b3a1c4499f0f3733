"""The gate: could we refute that a candidate's bytes equal the reference launch's? ``gate.examine`` answers."""
