# The run passes on the command's exit code or signal, and its output on both streams.
echo to standard output
echo file >made-before-the-end
exit 42
