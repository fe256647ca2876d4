"""What stands behind `turngym serve proxy`: who answers, who judges, who trains."""
