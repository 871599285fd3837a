//! Rules: which mode a path has, and why.
