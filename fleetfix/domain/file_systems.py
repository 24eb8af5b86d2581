"""Which file systems several hosts may have mounted at once.

What one host repairs there is changed under the others (pytorch/pytorch#173679).
"""

from __future__ import annotations

SHARED_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "glusterfs"),
        *("9p", "virtiofs", "wekafs", "panfs", "afs", "orangefs", "pvfs2", "ocfs2", "gfs2", "vastfs"),
        *("quobyte", "juicefs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs"),
        *("fuse.juicefs", "fuse.quobyte", "fuse.s3fs", "fuse.gcsfuse", "fuse.lustre", "fuse.weka"),
    }
)
