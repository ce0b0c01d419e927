# The beginning of each job of the course; after these lines come `setup` and `data` of site.toml.
# With these set, each srun and mpiexec in the job would start its processes without PATH.
unset SLURM_EXPORT_ENV SLURM_GET_USER_ENV
# An mpiexec reaches other nodes by a step of this job, and steps are exclusive: that of a second
# notebook, or of a program beside the ranks, would wait until the first one has ended.
export SLURM_OVERLAP=1
# Without cgroups a job may run on all cores of its node, and so may others: each mpiexec would bind
# its ranks to the first ones. Open MPI 5, then 4; what a command line says goes first.
threads="$(LC_ALL=C lscpu | sed -n 's/^Thread(s) per core: *//p' || true)"
cores="$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"    # nproc would obey them
if [ "$((cores / ${threads:-1}))" -gt "${SLURM_CPUS_ON_NODE:-0}" ]; then
    export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_hwloc_base_binding_policy=none
fi
