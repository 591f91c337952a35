"""What `custom_backend_module` names in a run that shall learn: the back end that was asked for, and a witness."""

import witness

witness.install()
