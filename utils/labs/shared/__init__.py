"""What two or more labs use: reference models, schedules, a table, pictures, a job script."""
