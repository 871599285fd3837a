# The command's own end is passed on, whatever it was, and its words go where they should.
echo to standard output
echo file >made-before-the-end
exit 42
