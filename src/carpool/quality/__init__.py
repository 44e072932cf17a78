"""Whether pictures and answers are still what they were: statistics, alarms, broken cameras, what to label."""
