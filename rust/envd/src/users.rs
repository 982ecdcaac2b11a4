//! Users and groups, read from /etc/passwd and /etc/group.
//!
//! The binary is static, so the C library's NSS is not available; sandboxes only have local users.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use hyper::header::{HeaderMap, AUTHORIZATION};

use crate::error::RpcError;

/// Most that is read of either file; a local user or group takes some 100 bytes.
const MAX_BYTES: u64 = 4 << 20;

/// A user a process or a file can belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids, the primary one included.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: String,
}

/// One reading of the two files; cheap enough to make per request.
#[derive(Debug, Default, Clone)]
pub struct UserDb {
    users: Vec<User>,
    group_names: HashMap<u32, String>,
}

impl UserDb {
    /// Reads /etc/passwd and /etc/group; a missing or unreadable file counts as empty.
    pub fn load() -> Self {
        let read = |path| read_small(Path::new(path)).unwrap_or_default();
        Self::parse(&read("/etc/passwd"), &read("/etc/group"))
    }

    /// Parses the two files' text; malformed lines are skipped.
    pub fn parse(passwd: &str, group: &str) -> Self {
        let mut group_names = HashMap::new();
        let mut member_of: HashMap<&str, Vec<u32>> = HashMap::new();
        for line in group.lines() {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, gid, members, ..] = fields[..] else { continue };
            let Ok(gid) = gid.parse::<u32>() else { continue };
            group_names.entry(gid).or_insert_with(|| name.to_owned());
            for member in members.split(',').map(str::trim).filter(|member| !member.is_empty()) {
                member_of.entry(member).or_default().push(gid);
            }
        }
        let users = passwd.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, uid, gid, _, home, shell, ..] = fields[..] else { return None };
            let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
            let mut groups = vec![gid];
            groups.extend(member_of.get(name).into_iter().flatten().filter(|&&other| other != gid));
            let home = PathBuf::from(if home.is_empty() { "/" } else { home });
            let shell = if shell.is_empty() { "/bin/sh" } else { shell }.to_owned();
            Some(User { name: name.to_owned(), uid, gid, groups, home, shell })
        });
        Self { users: users.collect(), group_names }
    }

    /// The user called `name`.
    ///
    /// # Errors
    /// `unauthenticated`, `invalid username: '<name>'`.
    pub fn user(&self, name: &str) -> Result<User, RpcError> {
        let found = self.users.iter().find(|user| user.name == name).cloned();
        // A minimal image may have no passwd file at all; root always exists.
        let root = || (name == "root").then(root_user);
        found.or_else(root).ok_or_else(|| RpcError::unauthenticated(format!("invalid username: '{name}'")))
    }

    /// The name of `uid`, or the number itself when it has none.
    pub fn user_name(&self, uid: u32) -> String {
        let found = self.users.iter().find(|user| user.uid == uid);
        found.map_or_else(|| uid.to_string(), |user| user.name.clone())
    }

    /// The name of `gid`, or the number itself when it has none.
    pub fn group_name(&self, gid: u32) -> String {
        self.group_names.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

/// The text of a regular file. The guest decides what is there, and a FIFO or an endless file must not stop the daemon.
///
/// # Errors
/// What the kernel answers; `InvalidData` for anything but a regular file of at most [`MAX_BYTES`].
fn read_small(path: &Path) -> io::Result<String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let mut bytes = Vec::new();
    if !file.metadata()?.is_file() || file.take(MAX_BYTES + 1).read_to_end(&mut bytes)? as u64 > MAX_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn root_user() -> User {
    User { name: "root".into(), uid: 0, gid: 0, groups: vec![0], home: "/root".into(), shell: "/bin/sh".into() }
}

/// The user named by `Authorization: Basic base64("<user>:")`; `None` when the header is absent or names nobody.
///
/// # Errors
/// `unauthenticated` when the header cannot be decoded.
pub fn requested_user(headers: &HeaderMap) -> Result<Option<String>, RpcError> {
    let Some(value) = headers.get(AUTHORIZATION) else { return Ok(None) };
    let malformed = || RpcError::unauthenticated("malformed Authorization header, expected: Basic base64(\"<user>:\")");
    let text = value.to_str().map_err(|_| malformed())?;
    let Some((scheme, encoded)) = text.split_once(' ') else { return Err(malformed()) };
    if !scheme.eq_ignore_ascii_case("basic") {
        // Another scheme (a bearer token of some proxy) does not name a user.
        return Ok(None);
    }
    let decoded = STANDARD.decode(encoded.trim()).map_err(|_| malformed())?;
    let decoded = String::from_utf8(decoded).map_err(|_| malformed())?;
    let name = decoded.split_once(':').map_or(decoded.as_str(), |(name, _)| name);
    Ok((!name.is_empty()).then(|| name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1000:,,,:/home/user:\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:user\n";

    #[test]
    fn parses_users_with_their_groups() {
        let db = UserDb::parse(PASSWD, GROUP);
        let user = db.user("user").expect("exists");
        assert_eq!((user.uid, user.gid, user.groups), (1000, 1000, vec![1000, 27]));
        assert_eq!((user.home.to_str(), user.shell.as_str()), (Some("/home/user"), "/bin/sh"));
        assert_eq!((db.user_name(0), db.user_name(7)), ("root".into(), "7".into()));
        assert_eq!((db.group_name(27), db.group_name(9)), ("sudo".into(), "9".into()));
        assert_eq!(db.user("ghost").expect_err("unknown").message, "invalid username: 'ghost'");
    }

    #[test]
    fn what_is_no_small_regular_file_is_not_read() {
        let dir = tempfile::tempdir().expect("directory");
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("f"), PASSWD).expect("written");
        assert_eq!(read_small(&at("f")).expect("readable"), PASSWD);
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("made");
        std::fs::File::create(at("endless")).and_then(|file| file.set_len(1 << 40)).expect("made");
        for path in [at("fifo"), at("endless"), dir.path().to_owned(), "/dev/zero".into()] {
            assert!(read_small(&path).is_err(), "{}", path.display());
        }
    }

    #[test]
    fn root_exists_without_a_passwd_file() {
        assert_eq!(UserDb::default().user("root").expect("root").uid, 0);
    }

    #[test]
    fn basic_authorization_names_the_user() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_static(value));
            requested_user(&headers)
        };
        assert_eq!(with("Basic cm9vdDo="), Ok(Some("root".into())));
        assert_eq!(with("Basic Og=="), Ok(None));
        assert_eq!(with("Bearer abc"), Ok(None));
        assert!(with("Basic ***").is_err());
        assert_eq!(requested_user(&HeaderMap::new()), Ok(None));
    }
}
