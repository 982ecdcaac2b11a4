//! Machine-wide things that change when a guest starts, resumes or is forked.

pub mod certificates;
pub mod clock;
pub mod entropy;
pub mod names;

use std::io::{self, Write};
use std::path::Path;

/// Replaces a file so that readers see the old or the new content, never a part. A symlink at `path` is replaced, not followed.
///
/// # Errors
/// Those of creating, writing or renaming.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".aenv-new");
    let temporary = path.with_file_name(name);
    let result = std::fs::File::create(&temporary)
        .and_then(|mut file| file.write_all(content))
        .and_then(|()| std::fs::rename(&temporary, path));
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_a_symlink_and_leaves_its_target() {
        let dir = tempfile::tempdir().expect("directory");
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::write(&target, "kept").expect("write");
        std::os::unix::fs::symlink(&target, &link).expect("symlink");
        replace_file(&link, b"new").expect("replace");
        assert_eq!(std::fs::read(&target).expect("read"), b"kept");
        assert_eq!(std::fs::read(&link).expect("read"), b"new");
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 2);
    }
}
