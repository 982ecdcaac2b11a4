//! How a path a client sends becomes an absolute one.

use std::path::{Component, Path, PathBuf};

use crate::error::RpcError;
use crate::users::User;

/// Resolves `path`: absolute as is, `~` and `~/x` under the user's home, anything else under `workdir`, or under the home when
/// there is none. The empty path is the base itself. `.` and `..` are folded in the text, as clients expect of a name; symlinks
/// are not looked at.
///
/// # Errors
/// `invalid_argument` when the path contains a NUL byte or names another user's home (`~other`).
pub fn resolve(path: &str, user: &User, workdir: Option<&str>) -> Result<PathBuf, RpcError> {
    if path.contains('\0') {
        return Err(RpcError::invalid_argument("path contains a NUL byte"));
    }
    let joined = if path == "~" {
        user.home.clone()
    } else if let Some(rest) = path.strip_prefix("~/") {
        user.home.join(rest.trim_start_matches('/'))
    } else if path.starts_with('~') {
        return Err(RpcError::invalid_argument(format!("'{path}': only '~' and '~/…' are supported")));
    } else {
        base(user, workdir)?.join(path)
    };
    Ok(clean(&joined))
}

/// Where a relative path starts: the default workdir (itself resolved against the home), else the home.
fn base(user: &User, workdir: Option<&str>) -> Result<PathBuf, RpcError> {
    match workdir.filter(|dir| !dir.is_empty()) {
        Some(dir) => resolve(dir, user, None),
        None => Ok(user.home.clone()),
    }
}

/// Folds `.`, `..` and repeated slashes; the result is absolute and `..` never climbs above `/`.
pub fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::ParentDir => {
                cleaned.pop();
            }
            Component::Normal(name) => cleaned.push(name),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User { name: "u".into(), uid: 1, gid: 1, groups: vec![1], home: "/home/u".into(), shell: "/bin/sh".into() }
    }

    #[test]
    fn resolves_every_form() {
        let cases = [
            ("/a/b", None, "/a/b"),
            ("/a/../../b//c/.", None, "/b/c"),
            ("~", None, "/home/u"),
            ("~/x", Some("/w"), "/home/u/x"),
            ("~//x", None, "/home/u/x"),
            ("x", None, "/home/u/x"),
            ("x", Some("/w"), "/w/x"),
            ("x", Some("rel"), "/home/u/rel/x"),
            ("", Some("/w"), "/w"),
            ("", Some(""), "/home/u"),
            ("../x", None, "/home/x"),
        ];
        for (path, workdir, expected) in cases {
            assert_eq!(resolve(path, &user(), workdir), Ok(PathBuf::from(expected)), "{path} in {workdir:?}");
        }
    }

    #[test]
    fn refuses_what_cannot_name_a_file() {
        assert!(resolve("a\0b", &user(), None).is_err());
        assert!(resolve("~other/x", &user(), None).is_err());
    }
}
