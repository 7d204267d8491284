"""The course's tools: one source a chapter in, one module and two notebooks out, a check that nothing drifted."""
