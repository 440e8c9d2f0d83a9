"""What the plugin puts into pytest's own reports: texts of failures, properties, warnings, and which failures have no verdict."""
